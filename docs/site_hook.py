"""MkDocs hooks: add the pages outside docs/, fill in the generated parts, and rewrite links.

README, SECURITY, CHANGELOG, other pages of the root, and the programs in examples/ become pages of the site.
Links in all pages are written for the repository; the hook rewrites them to pages of the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from generated import fill
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# File of the repository → page of the site.
BESIDE = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "GOVERNANCE.md": "governance.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "LICENSE": "license.md",
    "THIRD_PARTY_NOTICES.md": "third-party-notices.md",
} | {f"examples/{path.name}": f"examples/{path.stem}.md" for path in sorted((ROOT / "examples").glob("*.py"))}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and files outside docs/."""
    for name, page in BESIDE.items():
        files.append(File.generated(config, page, content=_content(name)))
    unchanged = [*filter(Path.is_file, (ROOT / "deploy").rglob("*")), *(ROOT / "examples").glob("*.ipynb")]
    for path in sorted(unchanged):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - MkDocs' names
    """Fill in the generated parts, and rewrite links of the repository to pages of the site."""
    here = page.file.src_uri
    beside = {site: name for name, site in BESIDE.items()}
    folder = posixpath.dirname(beside.get(here, f"docs/{here}"))
    return LINK.sub(lambda link: site_link(link[1], folder, posixpath.dirname(here)), fill(markdown))


def site_link(target: str, folder: str, site_folder: str) -> str:
    """Rewrite a link of a file in `folder` of the repository for its page in `site_folder` of the site."""
    name, hash_, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(folder, name))
    page = BESIDE.get(path) or path.removeprefix("docs/")
    return posixpath.relpath(page, site_folder or ".") + hash_ + anchor


def _content(name: str) -> str:
    text = (ROOT / name).read_text(encoding="utf-8")
    if name == "LICENSE":
        return f"# License\n\n```text\n{text}```\n"
    if name.endswith(".py"):
        return f"# {Path(name).name}\n\n```python\n{text}```\n"
    return text
