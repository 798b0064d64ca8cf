"""Text embeddings: files in a pool that all runs of a store share, and the index of an artifact's files.

A file of the pool is ``embeddings/<key>/<name>.safetensors`` next to the slots of datasets. The key is the digest of
the encoder's settings and the numerics, which decide the bits together with the text. The name is the prompt's id, so
that a text is encoded once, whichever other prompts it comes with. Each file is written once, whole, with a digest of
its own.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.nn.functional import pad

from cosmos_rl_core.canonical import canonical_json, digest, sha256
from cosmos_rl_core.datasets._base import prompt_id
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.models._conditioning import Conditioning
from cosmos_rl_core.storage import store
from cosmos_rl_core.weights.policy_weights import to_bytes
from stages.artifacts.artifact import Artifact
from stages.artifacts.files import read_entry
from stages.artifacts.pool import ENDING, POOL, check_not_swept, entries_of
from stages.artifacts.records import FileEntry
from stages.artifacts.request import Input, Request
from stages.artifacts.slots import folder_of
from stages.formats.members import KEPT_BYTES, Kept

NEGATIVE = "_negative"
"""The id of the negative prompt, for guidance. No prompt id begins with an underscore."""
EMPTY = "_empty"
"""The id of the empty prompt, for text dropout."""


_ABOUT = "about"
"""Key of a file's metadata. Its entry has a digest, and says how the tensors make a conditioning."""
_SHARED = "shared."
"""Beginning of the names of tensors that the predictions with the prompt and with the negative prompt share."""


def with_references(one: str, prompt: str) -> str:
    """Return the id of the negative or empty prompt that is encoded with the references of a prompt."""
    return f"{one}.{prompt}"


class Text(NamedTuple):
    """A text to encode."""

    name: str
    """Name of the file of its embeddings in the pool."""
    text: str | None
    """The text; None means the negative prompt that the stock pipeline has by default."""
    is_negative: bool = False
    """Whether it is encoded as the stock pipeline encodes its negative prompt."""
    references: tuple[str, ...] = ()
    """Digests of the references that it is encoded with."""

    @classmethod
    def negative(cls, text: str | None, references: tuple[str, ...] = ()) -> "Text":
        """Return the text for a negative prompt, or for the empty prompt that replaces a dropped text."""
        name = "negative" if text is None else f"negative-{prompt_id(text)}"
        # Many prompts may share a set of references, so the name has a digest of the set.
        name += f"-{digest([*references])[:16]}" if references else ""
        return cls(name, text, is_negative=True, references=references)

    def told(self) -> dict[str, Any]:
        """Return the fields that the digest of the text's file covers; without references as in earlier versions."""
        return {name: value for name, value in self._asdict().items() if name != "references" or value}


class Pool:
    """The pool's files of one encoder and its numerics, next to the slot of a Request."""

    def __init__(self, request: Request, numerics: Mapping[str, Any], unread_padding: Mapping[str, str | None]) -> None:
        # Files of one key may differ only in their texts.
        bare = request.config.model_copy(update={"prompts": (), "negative_prompt": None})
        made_by = {"recipe": request.model_copy(update={"config": bare}).recipe, "numerics": numerics}
        self._key = digest(made_by)
        self._root, self._unread_padding = folder_of(request.slot), unread_padding

    def find(self, texts: Sequence[Text]) -> Iterator[tuple[Text, FileEntry | None]]:
        """Yield each text and its file, every byte checked; None for a text that no process has encoded.

        Raises :class:`ArtifactError` for a damaged file, and :class:`UnavailableError` while files are being deleted.
        """
        check_not_swept(self._root)
        paths = {self._path(text): text for text in texts}
        for path, data in store.ahead(paths, lambda path: store.read_if_exists(store.join(self._root, path))):
            yield paths[path], None if data is None else self._checked(paths[path], data)

    def put(self, text: Text, embedding: Conditioning) -> FileEntry:
        """Write the file of a text without padding, unless another process has written it, and return its entry."""
        own = dict(embedding.own)
        for name, mask in self._unread_padding.items():
            rows = own[name if mask is None else mask]
            read = rows.reshape(len(rows), -1).any(dim=1).nonzero()
            own[name] = embedding.own[name][: int(read[-1]) + 1 if len(read) else 0]
        form = _Form({name: len(embedding.own[name]) for name in self._unread_padding}, embedding.shapes)
        tensors = own | {f"{_SHARED}{name}": tensor for name, tensor in embedding.shared.items()}
        data, path = self._sealed(text, tensors, form), self._path(text)
        if not store.put_if_absent(url := store.join(self._root, path), data):
            data = store.read(url)
        return self._checked(text, data)

    def _path(self, text: Text) -> str:
        return f"{POOL}/{self._key[:32]}/{text.name}{ENDING}"

    def _sealed(self, text: Text, stored: Mapping[str, Tensor], form: "_Form") -> bytes:
        told = form.told()
        about = {"key": self._key, **text.told(), **told, "tensors": sha256(to_bytes(stored))}
        # One entry: the library writes several in any order.
        entry = canonical_json({"digest": digest(about), **told}).decode()
        return save({name: stored[name].contiguous() for name in sorted(stored)}, {_ABOUT: entry})

    def _checked(self, text: Text, data: bytes) -> FileEntry:
        path = self._path(text)
        try:
            whole = self._sealed(text, load(data), _Form.of(data)) == data
        except (SafetensorError, ValueError, KeyError, struct.error):
            whole = False
        if not whole:
            url = store.join(self._root, path)
            raise ArtifactError(
                f"{url} is damaged, or not the embedding of its prompt; restore it, or remove it to have it made again"
            )
        return FileEntry(path=path, size=len(data), sha256=sha256(data))


class _Form(NamedTuple):
    """Facts of a conditioning that the tensors of its file do not show."""

    lengths: dict[str, int]
    """Number of rows, padding included, of each tensor whose padding the file leaves out."""
    shapes: tuple[tuple[int, int, int], ...] = ()
    """Tokens of each reference along frames, height and width."""

    @classmethod
    def of(cls, data: bytes) -> "_Form":
        """Return the form in the bytes of a file."""
        (size,) = struct.unpack_from("<Q", data)
        told = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][_ABOUT])
        shapes = ((frames, height, width) for frames, height, width in told.get("shapes", ()))
        return cls(told["lengths"], tuple(shapes))

    def told(self) -> dict[str, Any]:
        """Return the layout as JSON for a file, without ``shapes`` if there are no references."""
        return {"lengths": self.lengths} | ({"shapes": self.shapes} if self.shapes else {})


class Embeddings:
    """Conditioning by prompt id, unbatched, on the CPU, from one or several artifacts; each is read on access.

    The negative prompt is the first artifact's. At most ``kept_bytes`` of files stay in memory. Threads may share
    it. Raises :class:`ArtifactError` at once if one of ``prompt_ids`` was not embedded.
    """

    def __init__(self, sources: Sequence[Input], prompt_ids: Iterable[str], kept_bytes: int = KEPT_BYTES) -> None:
        self._places: dict[str, tuple[str, FileEntry]] = {}
        for source in sources:
            entries = entries_of(Artifact(source))
            self._places |= {one: (folder_of(source.url), entry) for one, entry in entries.items()} | self._places
        if missing := sorted({*prompt_ids} - self._places.keys()):
            raise ArtifactError(
                f"{', '.join(source.url for source in sources)} has no embedding of {', '.join(missing[:5])}; embed "
                "the prompts of this plan"
            )
        self._kept = Kept(kept_bytes)

    def negatives(self, prompt_ids: Sequence[str]) -> list[Conditioning]:
        """Return the negative prompt's conditioning for each prompt, with the prompt's references if it reads them."""
        own = [with_references(NEGATIVE, one) for one in prompt_ids]
        names = [one if one in self._places else NEGATIVE for one in own]
        found = {name: self[name] for name in {*names}}
        return [found[name] for name in names]

    def without_text(self, prompt_id: str) -> Conditioning:
        """Return a prompt's conditioning with the empty text in place of its own, and with its references."""
        name, own = with_references(EMPTY, prompt_id), self[prompt_id]
        return own.guided_by(self[name if name in self._places else EMPTY])

    def __getitem__(self, prompt_id: str) -> Conditioning:
        """Return a prompt's conditioning. Raises :class:`ArtifactError` if its file is missing or damaged."""
        root, entry = self._places[prompt_id]
        data = self._kept.get(prompt_id, lambda: read_entry(root, entry))
        form, own, shared = _Form.of(data), dict[str, Tensor](), dict[str, Tensor]()
        for name, tensor in load(data).items():
            if name.startswith(_SHARED):
                shared[name.removeprefix(_SHARED)] = tensor
            else:
                missing = form.lengths.get(name, len(tensor)) - len(tensor)
                own[name] = pad(tensor, (*(0, 0) * (tensor.ndim - 1), 0, missing)) if missing else tensor
        return Conditioning(own, shared, form.shapes)
