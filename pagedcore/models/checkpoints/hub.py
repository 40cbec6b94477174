"""Whether the hub has a model of a name: asked once and with a time limit, before anything is loaded from it.

Libraries ask for each file and again after each failure, which takes a minute where there is no network. Read
``loading.py`` for who asks.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Final

from pagedcore.errors import InvalidConfig, did_you_mean

TIME_LIMIT_S: Final = 10.0
"""How long the hub has to answer."""
_MOST_NAMES: Final = 8


class ModelName(str):
    """What a user calls a model, for all who read its files: on the hub it is looked up once."""

    found = ""


def find_on_hub(name: str, what: str) -> str:
    """Return the name; where the hub cannot be reached, the directory of its snapshot in the cache.

    Args:
        name: as the hub writes it; a ``ModelName`` remembers what was found.
        what: the setting that has the name, for errors.

    Raises:
        InvalidConfig: the hub has no such model for this user, or cannot be reached and none is in the cache; the
            message has the nearest of the names that are known here, and what to do.
    """
    if not isinstance(name, ModelName):
        return _look_up(name, what)
    name.found = name.found or _look_up(name, what)
    return name.found


def _look_up(name: str, what: str) -> str:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    answers = list[Exception | None]()
    # Why on a thread: to look an address up has a time limit of the system's own.
    asking = threading.Thread(target=lambda: answers.append(_ask(name)), name="pagedcore-hub", daemon=True)
    asking.start()
    asking.join(TIME_LIMIT_S)
    error = answers[0] if answers else TimeoutError()
    if error is None:
        return name
    if isinstance(error, GatedRepoError):
        raise InvalidConfig(f"{what}: the hub gives this model to those only who have accepted its terms there. Do so, "
                            "and log in (hf auth login).") from error
    if isinstance(error, RepositoryNotFoundError):
        raise InvalidConfig(f"{what}: there is no such directory here, and the hub shows no model of this name. "
                            f"{_advice(name)} For a private one log in (hf auth login).") from error
    if isinstance(found := try_to_load_from_cache(name, "config.json"), str):
        return os.fspath(Path(found).parent)
    raise InvalidConfig(f"{what}: there is no such directory here, and the hub could not be reached within "
                        f"{TIME_LIMIT_S:g} seconds ({type(error).__name__}). {_advice(name)} Give the directory of a "
                        "model, or try again with a network.") from error


def _ask(name: str) -> Exception | None:
    """Ask the hub for a model's configuration, once; ``None``: the hub knows the model."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", endpoint=constants.ENDPOINT), timeout=TIME_LIMIT_S)
    except EntryNotFoundError:
        return None  # Why: what its files lack, their readers say.
    except Exception as error:  # of whatever kind: several libraries are below
        return error
    return None


def _advice(name: str) -> str:
    known = ["demo", *_cached_names()]
    return f"{did_you_mean(name, known)} Known without a network: {', '.join(known[:_MOST_NAMES])}.".lstrip()


def _cached_names() -> list[str]:
    """Return the names of the models in the hub's cache, which has a directory ``models--owner--name`` for each."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    folders = sorted(path.name for path in cache.glob("models--*")) if cache.is_dir() else []
    return [folder.removeprefix("models--").replace("--", "/") for folder in folders]
