"""`python -m logprobe`: the command line."""

from logprobe.cli import command

if __name__ == "__main__":
    command()
