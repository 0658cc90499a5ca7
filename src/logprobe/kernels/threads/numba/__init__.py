"""What is compiled of workers: their start, items and arrays of a task, instructions, vectors."""
