"""Files that analyses read and write: rows of data sets, resumable outputs, tables."""
