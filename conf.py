"""Let sphinx-build use the settings in _config.yml.

`sphinx-build -c . . OUT` gives what `jupyter-book build .` gives; `-D language=zh_TW`,
`-b gettext` and `-b linkcheck` share the settings too.
"""

from pathlib import Path

from jupyter_book.config import get_final_config

_here = Path(__file__).parent
_settings, _ = get_final_config(
    user_yaml=_here / "_config.yml",
    sourcedir=_here,
    cli_config={"latex_individualpages": False},
)
globals().update(_settings)
external_toc_path = str(_here / "_toc.yml")
