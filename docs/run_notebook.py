"""Run the example notebook anew in its own folder and keep what it shows: `make notebook`.

What depends on the machine or the minute (times, versions) is left out, so that a run changes the file only
where what it shows changes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

DEFAULT = Path(__file__).parents[1] / "examples/surprisal.ipynb"


def main() -> None:
    """Run the notebooks named, or the one there is."""
    for name in sys.argv[1:] or [str(DEFAULT)]:
        path = Path(name)
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(
            notebook, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
        ).execute()
        for cell in notebook.cells:
            cell.metadata = {}
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
        nbformat.write(notebook, path)
        print(f"{path.name}: {sum(cell.cell_type == 'code' for cell in notebook.cells)} cells run")


if __name__ == "__main__":
    main()
