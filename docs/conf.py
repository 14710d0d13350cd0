"""Settings of Sphinx. Sources are this folder, the notebooks and a few files of the project's root:

python -m sphinx -W --keep-going -b html -c docs . site
"""

import sys
from pathlib import Path

import jaxfold
import jaxfold.extend
import jaxfold.linen
import jaxfold.nnx

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "jaxfold"
author = "the jaxfold authors"
version = release = jaxfold.__version__
root_doc = "docs/index"
include_patterns = ["README.md", "docs/**", "notebooks/**", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = ["docs/_extensions", ".*", "site", "dist", "tests", "jaxfold"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "mathml", "command_help"]

# Each name is documented where people import it from, not where it is defined.
for module in (jaxfold, jaxfold.linen, jaxfold.nnx, jaxfold.extend):
    for name, value in vars(module).items():
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("jaxfold._"):
            value.__module__ = module.__name__

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
# Names that share a description ("producer, norm: as for ...") stay together only in this style.
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]
default_role = "code"
# References to public names have to resolve; nothing is fetched for those of other libraries.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!jaxfold\.).*|jaxfold\._.*")]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
html_math_renderer = "mathml"

# Every notebook runs in a kernel of its own while the pages are built, and what it prints is what the reader sees.
nb_execution_mode = "force"
nb_execution_timeout = 240
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_output_stderr = "warn"

html_theme = "furo"
html_title = f"jaxfold {release}"
html_static_path = ["_static"]
html_css_files = ["formulas.css"]
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
