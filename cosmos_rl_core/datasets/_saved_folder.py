"""The files of a folder that ``save_to_disk`` of Hugging Face's ``datasets`` wrote, on a disk or in S3."""

from typing import TypeVar

from pydantic import BaseModel, Field, ValidationError

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import store

SPLITS, STATE = "dataset_dict.json", "state.json"


class _File(BaseModel):
    filename: str = Field(pattern=r"\.arrow$")


class _State(BaseModel):
    files: list[_File] = Field(alias="_data_files")
    split: str | None = Field(default=None, alias="_split")


class _Splits(BaseModel):
    splits: list[str] = Field(min_length=1)


_M = TypeVar("_M", bound=BaseModel)


class SavedFolder:
    """The Arrow files of one split."""

    url: str
    """The folder of the split."""
    stamps: dict[str, str]
    """Stamps of the Arrow files, by name."""

    def __init__(self, root: str, split: str) -> None:
        """Find the files of a split; "" for the only one. Raises :class:`ConfigError` for another layout."""
        self._root, self._found = root, _stamps(root)
        folder = self._split(split)
        self.url = store.join(root, *folder)
        names = [file.filename for file in self.json(_State, STATE).files]
        stamps = {name: self._found.get("/".join([*folder, name])) for name in names}
        if missing := [name for name, stamp in stamps.items() if stamp is None]:
            raise ConfigError(f"{self.url} lacks files that its {STATE} names: {', '.join(missing[:5])}; copy it again")
        if not stamps:
            raise ConfigError(f"{self.url} has no Arrow file")
        self.stamps = {name: str(stamp) for name, stamp in stamps.items()}

    def json(self, kind: type[_M], name: str) -> _M:
        """Return the values of a JSON file of the split. Raises :class:`ConfigError` if it is missing or not valid."""
        return _parsed(kind, store.join(self.url, name))

    def _split(self, wanted: str) -> list[str]:
        """Return the names of the folders from the root to the split."""
        if SPLITS not in self._found:
            if STATE not in self._found:
                expected = f"a folder that save_to_disk of `datasets` wrote, with {STATE} or {SPLITS}"
                raise ConfigError(f"{self._root} has neither; expected {expected}")
            if wanted not in ("", _parsed(_State, store.join(self._root, STATE)).split):
                raise ConfigError(f"{self._root} has no splits; leave split = {wanted!r} out")
            return []
        splits = _parsed(_Splits, store.join(self._root, SPLITS)).splits
        found = [split for split in splits if wanted in ("", split)]
        if len(found) != 1:
            raise ConfigError(f"{self._root}: split = {wanted!r}; expected one of {', '.join(splits)}")
        return found


def _parsed(kind: type[_M], url: str) -> _M:
    try:
        return kind.model_validate_json(store.read(url))
    except FileNotFoundError as error:
        raise ConfigError(f"no file at {url}; copy the folder again") from error
    except ValidationError as error:
        raise ConfigError(f"{url} is not what `datasets` writes: {error.errors()[0]['msg']}") from error


def _stamps(folder: str) -> dict[str, str]:
    try:
        return store.stamps(folder)
    except FileNotFoundError as error:
        raise ConfigError(f"no folder at {folder}; expected one that save_to_disk of `datasets` wrote") from error
