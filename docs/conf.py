"""Settings of the documentation's site: `make docs`."""

from importlib import metadata

project = "Stratagem"
author = "the Stratagem authors"
release = metadata.version("stratagem")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["measurements"]
html_theme = "furo"
html_title = f"Stratagem {release}"

myst_heading_anchors = 3
autodoc_typehints = "none"
autodoc_member_order = "groupwise"
autodoc_default_options = {"members": True, "inherited-members": False}
napoleon_use_ivar = True
