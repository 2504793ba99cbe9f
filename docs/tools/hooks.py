"""Hooks of MkDocs: the page of the command line, links that leave `docs/`, and the URL
of the repository.

Pages are written for GitHub as well as for the site, so that a link to code or to a
table of `bench/` is a relative path. The site has only `docs/`: such links become URLs
of the repository, and figures of `bench/` are copied into the site.
"""

import posixpath
import sys
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent.parent
# MkDocs runs this file by its path, so neither its folder nor the package is on the
# import path yet. It restores the path afterwards, so the package is imported here.
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]
import cli_page  # noqa: E402
from links import image_uri, outside_links  # noqa: E402

import stree_jax.cli.main  # noqa: E402, F401  # its modules stay imported

CLI_PAGE = "reference/cli.md"
REPOSITORY = "https://github.com/stree-jax/stree-jax"  # if pyproject.toml names none
BRANCH = "main"


def on_config(config: Any) -> Any:
    """Takes the URLs of the project from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    urls = project.get("urls", {})
    config.repo_url = urls.get("Repository", REPOSITORY).removesuffix("/")
    config.repo_name = "/".join(config.repo_url.split("/")[-2:])
    config.edit_uri = f"edit/{BRANCH}/docs/"
    site = urls.get("Documentation", "")
    if site and not site.startswith(config.repo_url):
        config.site_url = site.removesuffix("/") + "/"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the page of the command line, and images outside `docs/` that pages show."""
    files.append(File.generated(config, CLI_PAGE, content=cli_page.page()))
    added = set()
    for page in files.documentation_pages():
        text = page.content_string
        for _, path, _ in outside_links(text, page.src_uri):
            source, uri = ROOT / path, image_uri(path)
            if uri and uri not in added and source.is_file():
                files.append(File.generated(config, uri, abs_src_path=str(source)))
                added.add(uri)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrites the links of a page that leave `docs/`.

    Raises:
      PluginError: a link leads to a file that the repository does not have.
    """
    uri = page.file.src_uri
    pieces, end = [], 0
    for span, path, anchor in outside_links(markdown, uri):
        if not (ROOT / path).exists():
            raise PluginError(f"{uri}: {markdown[slice(*span)]}: no such file")
        new = image_uri(path)
        if new:
            new = posixpath.relpath(new, posixpath.dirname(uri) or ".")
        else:
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            new = f"{config.repo_url}/{kind}/{BRANCH}/{path}{anchor}"
        pieces += [markdown[end : span[0]], new]
        end = span[1]
    return "".join([*pieces, markdown[end:]])
