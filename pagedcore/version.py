"""The version of pagedcore: the one place it stands; packaging reads it from here."""

from typing import Final

__version__: Final = "0.1.0"
