"""Schema: the structure and leaf types that all samples of a dataset share, with its encoder and decoders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from liveset.errors import Corrupt, DatasetError, MissingDependency, PickleRefused, SampleError, UnsupportedFormat
from liveset.format import infer as _infer
from liveset.format.jsonleaf import NotExact
from liveset.format.leaves import LeafCode, leaf_code
from liveset.format.sample import Damaged, Decode, Encode, Iterate, Mismatch, compile_decoder, compile_encoder
from liveset.format.tree import Leaf, Node, Path, field_names, leaves, locate, parse_spec, path_text, to_spec, with_leaf


@dataclass(frozen=True, slots=True)
class Schema:
    """The structure and leaf types that all samples of a dataset share.

    Example:
        >>> print(Schema.of({"id": "play-1", "label": 3}))
        id     str
        label  int
    """

    root: Node

    @classmethod
    def of(cls, sample: Any, *, allow_pickle: bool = False) -> Schema:
        """Return the schema of one sample; ``SampleError`` or ``PickleRefused`` when it cannot be stored."""
        return cls(_infer.infer(sample, allow_pickle=allow_pickle))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], file: str = "index.json") -> Schema:
        """Return the schema that the ``config`` of an index describes."""
        formats, spec = config["data_format"], config["data_spec"]
        if spec is None or not isinstance(spec, str) or not isinstance(formats, list):
            raise UnsupportedFormat(f"{file}: the dataset has no `data_spec`; loaders for foreign layouts are not supported.")
        if not all(isinstance(fmt, str) for fmt in formats):
            raise Corrupt(f"{file}: `data_format` is not a list of leaf types.", file=file)
        return cls(parse_spec(spec, formats, file))

    def to_config(self) -> dict[str, Any]:
        """Return the members ``data_format`` and ``data_spec`` of an index config."""
        return {"data_format": self.formats, "data_spec": to_spec(self.root)}

    @property
    def formats(self) -> list[str]:
        """The ``data_format`` strings of the leaves in storage order."""
        return [leaf.format for _, leaf in leaves(self.root)]

    @property
    def fields(self) -> dict[str, str]:
        """The leaves by name, such as ``{"id": "str", "boxes[0]": "numpy"}``; no two have the same."""
        names = field_names(self.root)
        return {names[path]: leaf.format for path, leaf in leaves(self.root)}

    def __str__(self) -> str:
        names = field_names(self.root)
        rows = [(names[path], _infer.describe(leaf)) for path, leaf in leaves(self.root)]
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join(f"{name:<{width}}  {kind}" for name, kind in rows)

    def join(self, other: Schema) -> Schema:
        """Return the narrowest schema that holds the samples of both; ``SampleError`` when there is none."""
        return Schema(_infer.join(self.root, other.root))

    def nullable(self, fields: Iterable[str]) -> Schema:
        """Return the schema in which the named fields may also be None."""
        return Schema(_infer.make_nullable(self.root, fields))

    def select(self, fields: Iterable[str]) -> frozenset[int]:
        """Return the numbers of the leaves at or below the named fields; ``ValueError`` names unknown ones."""
        names = list(fields)
        wanted: set[int] = set()
        known = [path for path, _ in leaves(self.root)]
        for name in names:
            place = locate(self.root, name)
            found = {i for i, path in enumerate(known) if place is not None and path[: len(place[0])] == place[0]}
            if not found:
                raise ValueError(f"fields= names {name!r}, but the samples have the fields {', '.join(self.fields)}.")
            wanted |= found
        return frozenset(wanted)


class Encoder:
    """Turns samples into items; widens its schema when a sample does not fit, unless the schema is fixed.

    Args:
        schema: the schema to start from; None takes that of the first sample.
        fixed: never widen: a sample that does not fit is a ``SampleError``.
        nullable: names of fields that may be None from the start.
        allow_pickle: store objects of any type with pickle.
        path: where the values stand in a sample, if they are not whole samples.
    """

    def __init__(
        self,
        schema: Schema | None = None,
        *,
        fixed: bool = False,
        nullable: Iterable[str] = (),
        allow_pickle: bool = False,
        path: Path = (),
    ) -> None:
        self.schema = schema
        self._path = path
        self._fixed = fixed
        self._nullable = tuple(nullable)
        self._allow_pickle = allow_pickle
        self.encode_exact: Encode = _never
        if schema is not None:
            self._compile(schema)

    def encode(self, sample: Any) -> bytes:
        """Return the item of a sample, widening ``schema`` if need be.

        Raises:
            SampleError: the sample does not fit a fixed schema, or cannot be stored so that it reads back equal; ``field`` names the place.
            PickleRefused: a value needs ``allow_pickle=True``.
        """
        while True:
            try:
                return self.encode_exact(sample)
            except (Mismatch, UnicodeEncodeError, NotExact) as error:
                self._widen(sample, error)

    def _compile(self, schema: Schema) -> None:
        codes = [leaf_code(fmt, allow_pickle=self._allow_pickle) for fmt in schema.formats]
        self.schema, self.encode_exact = schema, compile_encoder(schema.root, codes)

    def _widen(self, sample: Any, error: Exception) -> None:
        """Make the schema hold the sample too, or say why that is impossible."""
        seen = Schema(_infer.infer(sample, allow_pickle=self._allow_pickle, path=self._path))
        if self.schema is None:
            self._compile(seen.nullable(self._nullable) if self._nullable else seen)
            return
        wider = self.schema.join(seen) if not self._fixed else self._joined_or_none(seen)
        if wider == self.schema:
            # The type fits and the value does not, as a JSON list with a NaN in it.
            wider = self._give_up_json(sample, error)
        if self._fixed or wider is None:
            raise self._refusal(sample, seen)
        self._compile(wider)

    def _joined_or_none(self, seen: Schema) -> Schema | None:
        try:
            return self.schema.join(seen) if self.schema else None
        except SampleError:
            return None

    def _give_up_json(self, sample: Any, error: Exception) -> Schema | None:
        assert self.schema is not None
        for number, value in enumerate(leaf_values(self.schema.root, sample)):
            fmt = self.schema.formats[number]
            try:
                leaf_bytes(value, fmt, self._allow_pickle)
            except NotExact:
                return Schema(with_leaf(self.schema.root, number, Leaf("pickle")))
            except UnicodeEncodeError as problem:
                path, _ = list(leaves(self.schema.root, self._path))[number]
                name = path_text(path)
                raise SampleError(f"field {name!r}: the text is not valid Unicode ({problem}); store it as bytes.", field=name) from error
        raise SampleError("the sample is too large for one chunk: an item must stay below 4 GiB.") from error

    def _refusal(self, sample: Any, seen: Schema) -> SampleError:
        assert self.schema is not None
        path, have, new = _difference(self.schema, seen)
        if new != "missing":
            for step in path:
                sample = sample[step]
            new = "None" if sample is None else new
        field = path_text((*self._path, *path))
        return SampleError(f"field {field!r} is {new} here, but the dataset has {have}.", field=field)


def _never(_: Any) -> bytes:
    raise Mismatch


def leaf_values(node: Node, sample: Any) -> list[Any]:
    """Return the values of a sample that fits a tree, leaf by leaf."""
    if isinstance(node, Leaf):
        return [sample]
    children = [sample[key] for key in node.keys] if node.keys is not None else list(sample)
    return [value for child, part in zip(children, node.children, strict=True) for value in leaf_values(part, child)]


def leaf_bytes(value: Any, fmt: str, allow_pickle: bool) -> bytes:
    """Return the bytes of one leaf (without its size); raises what its encoder raises."""
    return compile_encoder(Leaf(fmt), [leaf_code(fmt, allow_pickle=allow_pickle)])(value)[4:]


def first_difference(a: Schema, b: Schema) -> tuple[str, str, str]:
    """Return the first field in which two schemas differ, with both descriptions."""
    path, have, new = _difference(a, b)
    return path_text(path), have, new


def _difference(a: Schema, b: Schema) -> tuple[Path, str, str]:
    have, new = dict(leaves(a.root)), dict(leaves(b.root))
    for path, leaf in new.items():
        if path not in have:
            return path, "no such field", _infer.describe(leaf)
        if have[path] != leaf and not _holds(have[path], leaf):
            return path, _infer.describe(have[path]), _infer.describe(leaf)
    for path, leaf in have.items():
        if path not in new:
            return path, _infer.describe(leaf), "missing"
    return (), _infer.describe(a.root), _infer.describe(b.root)


def _holds(leaf: Leaf, other: Leaf) -> bool:
    try:
        return _infer.join(leaf, other) == leaf
    except SampleError:
        return False


class Decoder:
    """Turns items back into samples.

    Args:
        schema: what the items hold.
        fields: names of the fields to decode; None means whole samples.
        allow_pickle: let pickle leaves create objects of any type. Only for datasets that you trust.
        serializers: readers for leaf types by name, before ours.
        strict: an item must end exactly where its leaves end.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        fields: Iterable[str] | None = None,
        allow_pickle: bool = False,
        serializers: Mapping[str, Any] | None = None,
        strict: bool = True,
    ) -> None:
        self.schema = schema
        self.fields = None if fields is None else tuple(fields)
        wanted = schema.select(self.fields) if self.fields is not None else None
        self.codes = [
            leaf_code(fmt, allow_pickle=allow_pickle, serializers=serializers) if wanted is None or i in wanted else _skipped(fmt)
            for i, fmt in enumerate(schema.formats)
        ]
        self.wanted = wanted
        decode, iterate = compile_decoder(schema.root, self.codes, wanted, strict=strict)
        self.decode: Decode = decode
        self.iterate: Iterate = iterate

    def explain(self, item: bytes, error: Exception, place: str, file: str) -> DatasetError:
        """Return the error to raise for an item that did not decode: which field, and what to do.

        Args:
            item: the bytes of the item.
            error: what decoding raised.
            place: where the item stands, such as ``sample 3 of chunk-0-0.bin``.
            file: the file that holds it.
        """
        field = self._failing_field(item)
        where = f"{place}, field {field!r}" if field else place
        if isinstance(error, PickleRefused):
            return PickleRefused(f"{where}: {error}", field=field, file=file)
        if isinstance(error, MissingDependency):
            return MissingDependency(f"{where}: {error}", field=field, file=file)
        if isinstance(error, Damaged):
            reason = "its stored sizes contradict each other"
        else:
            reason = str(error) if isinstance(error, DatasetError) else f"{type(error).__name__}: {error}"
        hint = "`liveset verify` tells whether the file changed since it was written."
        return Corrupt(f"{where} is damaged: {reason.rstrip('.')}. {hint}", file=file, field=field)

    def _failing_field(self, item: bytes) -> str:
        names = list(self.schema.fields)
        for number, name in enumerate(names):
            if self.wanted is not None and number not in self.wanted:
                continue
            decode, _ = compile_decoder(self.schema.root, self.codes, frozenset([number]), strict=False)
            try:
                decode(item, 0, len(item))
            except Damaged:
                return ""
            except Exception:
                return name
        return ""


def _skipped(fmt: str) -> LeafCode:
    """Return templates for a leaf that is not decoded: no leaf type is needed for that."""
    try:
        code = leaf_code(fmt)
    except (DatasetError, ImportError):
        return LeafCode("False", "None", "None")
    return LeafCode("False", "None", "None", pack=code.pack, unit=code.unit)
