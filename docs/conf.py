"""Sphinx, with Markdown pages. No other project's inventory is fetched, so a build is offline."""

from importlib.metadata import version as installed_version

project = "trio_watchdog"
author = "trio_watchdog maintainers"
copyright = f"2026, {author}"
release = installed_version("trio-watchdog")
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
# The toctrees name pages that are still to be written. One that was renamed or mistyped is noticed
# all the same, since the page itself would then be in no toctree.
suppress_warnings = ["toc.not_readable"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"trio_watchdog {release}"
