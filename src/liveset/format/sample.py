"""Samples to bytes and back, by functions that are generated for one schema.

An item is ``u32`` sizes, one per leaf, then the bytes of the leaves. Generating straight-line code per schema (as dataclasses do for
``__init__``) brings decoding to the speed of code written by hand for that schema. Only names and literals made here enter the source: keys
are quoted by ``repr`` of builtin scalars, formats choose among our own templates.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from liveset.format.leaves import FIXED_SIZES, LeafCode
from liveset.format.tree import MAPPING_KINDS, Branch, Leaf, Node, leaves

Encode: TypeAlias = Callable[[Any], bytes]
Decode: TypeAlias = Callable[[Any, int, int], Any]
DecodeLeaves: TypeAlias = Callable[[Any, Sequence[int], Sequence[int]], list[Any]]
Iterate: TypeAlias = Callable[[Any, Sequence[int], Callable[[int, Exception], None]], Iterator[Any]]


_CONTAINERS = {"OrderedDict": OrderedDict, "defaultdict": defaultdict, "deque": deque}


class Mismatch(Exception):
    """A sample does not have the shape that the generated code is for; ``leaf`` is the number of the leaf, or None for the structure."""

    def __init__(self, leaf: int | None = None) -> None:
        super().__init__(leaf)
        self.leaf = leaf


class Damaged(Exception):
    """The sizes stored in an item contradict its length or its leaf types."""


def _compile(name: str, lines: list[str], names: dict[str, Any]) -> Any:
    space = dict(names)
    exec(compile("\n".join(lines), f"<liveset {name}>", "exec"), space)
    return space[name]


# --- encoding -------------------------------------------------------------------------------------------------------


def compile_encoder(root: Node, codes: Sequence[LeafCode]) -> Encode:
    """Return ``encode(sample) -> bytes``; it raises ``Mismatch`` for a sample of another shape, and what leaf encoders raise."""
    names: dict[str, Any] = {"Mismatch": Mismatch, "StructError": struct.error, **_CONTAINERS}
    for code in codes:
        names.update(code.names)
    body: list[str] = []
    values = _unpack(root, "sample", body, iter(range(1 << 30)), names)
    lines = [
        "def encode(sample):",
        "  try:",
        *(f"    {line}" for line in body or ["pass"]),
        "  except KeyError:",
        "    raise Mismatch() from None",
    ]
    sizes: list[str] = []
    segments: list[str] = []
    run: list[tuple[str, str]] = []

    def close_run() -> None:
        if run:
            packer = f"pack_{len(names)}"
            names[packer] = struct.Struct("<" + "".join(char for char, _ in run)).pack
            segments.append(f"{packer}({', '.join(value for _, value in run)})")
            run.clear()

    for number, (value, code) in enumerate(zip(values, codes, strict=True)):
        if code.check:
            lines.append(f"  if not ({code.check.format(v=value)}): raise Mismatch({number})")
        if code.pack:
            sizes.append(str(FIXED_SIZES[code.pack]))
        else:
            lines.append(f"  b{number} = {code.encode.format(v=value)}")
            sizes.append(f"len(b{number})")
            if code.head:
                lines.append(f"  h{number} = {code.head.format(v=value)}")
                sizes[-1] += f" + len(h{number})"
    run.extend(("I", size) for size in sizes)
    for number, (value, code) in enumerate(zip(values, codes, strict=True)):
        if code.pack:
            run.append((code.pack, value))
        else:
            close_run()
            segments += [f"h{number}", f"b{number}"] if code.head else [f"b{number}"]
    close_run()
    # Adding copies what came before once more for each part; it is only quicker where there are few and they are small.
    added = len(segments) <= 3 and not any("array_view" in code.names for code in codes)
    joined = " + ".join(segments) if added else f"b''.join(({', '.join(segments)}))"
    lines += ["  try:", f"    return {joined or 'bytes()'}", "  except StructError:", "    raise Mismatch() from None"]
    encode: Encode = _compile("encode", lines, names)
    return encode


def _unpack(node: Node, value: str, lines: list[str], numbers: Iterator[int], names: dict[str, Any]) -> list[str]:
    """Add the lines that check the containers of a sample and name the values of its leaves; return those names."""
    if isinstance(node, Leaf):
        return [value]
    count = len(node.children)
    condition = f"type({value}) is not {node.kind} or len({value}) != {count}"
    if node.kind == "OrderedDict":
        condition += f" or tuple({value}) != {node.keys!r}"
    elif node.kind == "defaultdict":
        condition += f" or {value}.default_factory is not {node.option}"
    elif node.kind == "deque":
        condition += f" or {value}.maxlen != {node.option!r}"
    lines.append(f"if {condition}: raise Mismatch()")
    children = [f"v{next(numbers)}" for _ in node.children]
    if node.keys is not None:
        lines.extend(f"{child} = {value}[{key!r}]" for child, key in zip(children, node.keys, strict=True))
    elif children:
        lines.append(f"{', '.join(children)}, = {value}")
    found: list[str] = []
    for child, part in zip(children, node.children, strict=True):
        found += _unpack(part, child, lines, numbers, names)
    return found


# --- decoding -------------------------------------------------------------------------------------------------------


class _Reader:
    """Source of the body that decodes the item at ``o`` up to ``end`` of buffer ``b``; with ``stream``, ``m`` is a memoryview of it."""

    def __init__(self, root: Node, codes: Sequence[LeafCode], wanted: frozenset[int] | None, strict: bool, stream: bool) -> None:
        self.names: dict[str, Any] = {"Damaged": Damaged, **_CONTAINERS}
        self.codes = codes
        self.wanted = wanted if wanted is not None else frozenset(range(len(codes)))
        self.values: dict[int, str] = {}
        self.lines: list[str] = []
        self._positions(strict)
        self._fixed()
        for number in sorted(self.wanted):
            code = codes[number]
            if not code.pack:
                self.names.update(code.names)
                template = code.stream if stream and code.stream else code.decode
                self.values[number] = template.format(b="b", m="m", p=f"p{number}", e=f"p{number + 1}" if number + 1 < len(codes) else "e")
        self.result = self._build(root, iter(range(len(codes))))[0]

    def _positions(self, strict: bool) -> None:
        count = len(self.codes)
        wrong = "!=" if strict else ">"
        if not count:
            self.lines.append(f"if o {wrong} end: raise Damaged()")
            return
        self.names["sizes"] = struct.Struct(f"<{count}I").unpack_from
        self.lines.append(f"{', '.join(f's{i}' for i in range(count))}, = sizes(b, o)")
        self.lines.append(f"p0 = o + {4 * count}")
        checks = []
        for number, code in enumerate(self.codes):
            here = "e" if number + 1 == count else f"p{number + 1}"
            size = f"s{number}"
            if code.pack:
                checks.append(f"{size} != {FIXED_SIZES[code.pack]}")
            elif code.unit > 1:
                checks.append(f"{size} & {code.unit - 1}")
            self.lines.append(f"{here} = p{number} + {size}")
        self.lines.append(f"if {' or '.join([f'e {wrong} end', *checks])}: raise Damaged()")

    def _fixed(self) -> None:
        """Unpack neighbouring fixed-size leaves by one call."""
        run: list[int] = []
        for number, code in enumerate([*self.codes, None]):
            if code is not None and code.pack and number in self.wanted:
                run.append(number)
            elif run:
                unpacker = f"unpack_{run[0]}"
                self.names[unpacker] = struct.Struct("<" + "".join(self.codes[i].pack for i in run)).unpack_from
                self.values.update({i: f"x{i}" for i in run})
                self.lines.append(f"{', '.join(f'x{i}' for i in run)}, = {unpacker}(b, p{run[0]})")
                run = []

    def _build(self, node: Node, numbers: Iterator[int]) -> tuple[str, bool]:
        """Return the expression of a node, and whether it holds anything that is wanted."""
        if isinstance(node, Leaf):
            number = next(numbers)
            return self.values.get(number, "None"), number in self.wanted
        parts = [self._build(child, numbers) for child in node.children]
        keep = [i for i, (_, wanted) in enumerate(parts) if wanted or not any(True for _ in leaves(node.children[i]))]
        text = self._container(node, [(node.keys[i] if node.keys is not None else None, parts[i][0]) for i in keep])
        return text, any(wanted for _, wanted in parts)

    @staticmethod
    def _container(node: Branch, items: list[tuple[Any, str]]) -> str:
        if node.kind in MAPPING_KINDS:
            if node.kind == "OrderedDict":
                return f"OrderedDict([{', '.join(f'({key!r}, {text})' for key, text in items)}])"
            plain = "{" + ", ".join(f"{key!r}: {text}" for key, text in items) + "}"
            return f"defaultdict({node.option}, {plain})" if node.kind == "defaultdict" else plain
        inner = ", ".join(text for _, text in items)
        if node.kind == "tuple":
            return f"({inner},)" if items else "()"
        return f"[{inner}]" if node.kind == "list" else f"deque([{inner}], {node.option!r})"


def compile_decoder(
    root: Node, codes: Sequence[LeafCode], wanted: frozenset[int] | None = None, *, strict: bool = True
) -> tuple[Decode, Iterate]:
    """Return ``decode(buffer, start, end)`` and ``iterate(buffer, bounds, fail)`` for a tree.

    Args:
        root: the tree; ``codes`` belong to its leaves in storage order.
        codes: templates of the leaves.
        wanted: numbers of the leaves to decode; the others are left out of the sample. None means all.
        strict: an item must end exactly where its leaves end; otherwise it may be longer (the format allows padding).

    ``iterate`` yields one sample per pair of neighbouring bounds; where one is damaged it calls ``fail(start of the item, error)``, which
    must raise.
    """
    single = _Reader(root, codes, wanted, strict, stream=False)
    decode_lines = ["def decode(b, o, end):", *(f"  {line}" for line in single.lines), f"  return {single.result}"]
    stream = _Reader(root, codes, wanted, strict, stream=True)
    iterate_lines = [
        "def iterate(b, bounds, fail):",
        "  m = memoryview(b)",
        "  o = bounds[0]",
        "  for end in bounds[1:]:",
        "    try:",
        *(f"      {line}" for line in stream.lines),
        f"      sample = {stream.result}",
        "    except Exception as error:",
        "      fail(o, error)",
        "    yield sample",
        "    o = end",
    ]
    return _compile("decode", decode_lines, single.names), _compile("iterate", iterate_lines, stream.names)


def compile_leaf_decoder(code: LeafCode) -> DecodeLeaves:
    """Return ``decode(buffer, starts, ends)``, which lists the values of one leaf of many samples (nothing for a ``pack``)."""
    value = (code.stream or code.decode or "None").format(b="b", m="m", p="p", e="e")
    lines = ["def decode(b, starts, ends):", "  m = memoryview(b)", f"  return [{value} for p, e in zip(starts, ends)]"]
    decode: DecodeLeaves = _compile("decode", lines, dict(code.names))
    return decode
