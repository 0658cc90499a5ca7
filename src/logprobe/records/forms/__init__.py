"""A record in other forms: bytes, Arrow and Parquet, JSON."""
