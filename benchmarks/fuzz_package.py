"""Checks that `accelcheck verify` detects altered packages and never crashes, on 1,000 mutations.

    python benchmarks/fuzz_package.py [--count 1000] [--seed 0]

Each mutation is tried on an unsigned package and on a signed one with its key: flipped bits, cut and swapped parts,
inserted, doubled or removed members, links, other archive formats, edited records with and without recomputed hashes.
Every altered signed package must be found, and every unsigned one but those with all hashes recomputed, which only a
signature shows.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import hashlib
import io
import json
import lzma
import random
import re
import sys
import tarfile
import tempfile
import time
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accelcheck.core.bounded import Piece, read
from accelcheck.expectations import must_pass
from accelcheck.expectations.ledger import shipped
from accelcheck.report.package import archive, chain, manifest, packing, signing
from accelcheck.report.package.archive import BLOCK, NotPackageError
from accelcheck.report.package.verifying import verify

if TYPE_CHECKING:
    from collections.abc import Callable

STORED = Path(__file__).parent.parent / "baselines" / "cpu" / "level1.jsonl"
RECORDS = 20
"""Records of the package's journal: enough for every kind of line, few enough for a thousand readings."""
SLOWEST = 5.0
"""Seconds that one reading may take."""
JOURNAL = "journals/001.jsonl"


@dataclass(frozen=True)
class Package:
    """A package: its bytes, its members, and the folder with its key."""

    raw: bytes
    members: dict[str, bytes]
    folder: Path

    def built(self, members: dict[str, bytes] | list[tuple[str, bytes]]) -> bytes:
        """A package with these members, and their hashes as they are."""
        made = io.BytesIO()
        pairs = members.items() if isinstance(members, dict) else members
        archive.write(made, ((name, len(content), [content]) for name, content in pairs))
        return made.getvalue()

    def renewed(self, members: dict[str, bytes], *, chained: bool = True) -> bytes:
        """A package with these members and all hashes recomputed, which takes no key."""
        members = dict(members)
        listed = manifest.decode(self.members[manifest.NAME])
        journals = []
        for journal in listed.journals:
            file = self.folder / "journal"
            file.write_bytes(members[journal.name])
            links = [*chain.links(file)]
            if chained:
                members[journal.chain] = b"".join(map(chain.encode, links))
            head = links[-1][0] if links else ""
            journals.append(
                manifest.ListedJournal(journal.name, len(links), head, journal.chain) if chained else journal
            )
        first = {
            name: members.pop(name) for name in (manifest.NAME, manifest.SIGNATURE, manifest.DIGEST) if name in members
        }
        made = [
            manifest.ListedMember(name, len(content), packing.Content.of(content).sha256)
            for name, content in sorted(members.items())
        ]
        raw = manifest.encode(
            manifest.Manifest(listed.schema, listed.accelcheck, tuple(journals), tuple(made), listed.missing)
        )
        first |= {manifest.NAME: raw, manifest.DIGEST: manifest.digest(raw)}
        return self.built({**first, **dict(sorted(members.items()))})


def flipped(package: Package, draw: random.Random) -> bytes:
    made = bytearray(package.raw)
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        made[draw.randrange(len(made))] ^= 1 << draw.randrange(8)
    return bytes(made)


def truncated(package: Package, draw: random.Random) -> bytes:
    return package.raw[: draw.randrange(len(package.raw))]


def lengthened(package: Package, draw: random.Random) -> bytes:
    return package.raw + draw.choice((b"\0", b"\n", bytes(BLOCK), draw.randbytes(700)))


def cut(package: Package, draw: random.Random) -> bytes:
    start = draw.randrange(len(package.raw))
    return package.raw[:start] + package.raw[start + draw.choice((1, 7, BLOCK, 4 * BLOCK)) :]


def inserted(package: Package, draw: random.Random) -> bytes:
    start = draw.randrange(len(package.raw))
    return package.raw[:start] + draw.choice((b"\0", bytes(BLOCK), draw.randbytes(BLOCK))) + package.raw[start:]


def swapped(package: Package, draw: random.Random) -> bytes:
    pairs = [*package.members.items()]
    first, other = draw.sample(range(len(pairs)), 2)
    pairs[first], pairs[other] = pairs[other], pairs[first]
    return package.built(pairs)


def exchanged(package: Package, draw: random.Random) -> bytes:
    first, other = draw.sample([*package.members], 2)
    return package.built({**package.members, first: package.members[other], other: package.members[first]})


def doubled(package: Package, draw: random.Random) -> bytes:
    pairs = [*package.members.items()]
    name, content = draw.choice(pairs)
    pairs.insert(draw.randrange(len(pairs) + 1), (name, draw.choice((content, content + b"\n", b""))))
    return package.built(pairs)


def without(package: Package, draw: random.Random) -> bytes:
    name = draw.choice([*package.members])
    return package.built({key: value for key, value in package.members.items() if key != name})


def with_more(package: Package, draw: random.Random) -> bytes:
    name = draw.choice(("notes.txt", "journals/999.jsonl", "ledgers/other.toml", "zzz"))
    return package.built({**package.members, name: draw.randbytes(draw.randrange(2000))})


def foreign(package: Package, draw: random.Random) -> bytes:
    """A member of another kind, or with a name that leads out of the archive, put in with a right checksum."""
    info = tarfile.TarInfo(
        draw.choice(
            ("/etc/passwd", "../outside", "a/../../b", "a\\b", ".hidden", "c:x", "x" * 99, "journals/001.jsonl")
        )
    )
    kinds = (b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"L", b"K", b"S", b"x", b"g", b"\0", b"V")
    info.type, info.linkname = draw.choice(kinds), draw.choice(("", "/etc/passwd", "../.."))
    info.mode, info.mtime, info.uname = draw.choice((0o644, 0o4777)), draw.choice((0, 1)), draw.choice(("", "root"))
    content = draw.randbytes(draw.randrange(600))
    info.size = draw.choice((len(content), 0, 2**33 - 1, 2**62))
    block = info.tobuf(tarfile.GNU_FORMAT, "ascii", "surrogateescape") + content + bytes(-len(content) % BLOCK)
    places = [
        match.start() for match in re.finditer(rb"journals/|chains/|devices", package.raw) if match.start() % BLOCK == 0
    ]
    place = draw.choice([0, *places, len(package.raw) - 2 * BLOCK])
    return package.raw[:place] + block + package.raw[place:]


def bomb(package: Package, draw: random.Random) -> bytes:
    """A compressed archive: the whole package, or a bomb of 64 MiB."""
    much = bytes(1 << 26)
    content = draw.choice((package.raw, much))
    if draw.random() < 0.3:
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr(manifest.NAME, content)
        return made.getvalue()
    return draw.choice(
        (lambda raw: gzip.compress(raw, 1), lambda raw: bz2.compress(raw, 1), lambda raw: lzma.compress(raw, preset=0))
    )(content)


def listed_otherwise(package: Package, draw: random.Random) -> bytes:
    """A package with an invalid manifest and its right digest."""
    raw = package.members[manifest.NAME]
    made = draw.choice(
        (
            b"",
            b"null",
            b"[" * 100_000,
            b'{"a":' * 20_000,
            raw[: len(raw) // 2],
            raw.replace(b'"schema": 1', b'"schema": ' + b"9" * draw.choice((1, 30, 5000))),
            raw.replace(b'"size": ', b'"size": -'),
            raw.replace(b'"size": ', b'"size": 9999999999'),
            raw.replace(b"journals/001", draw.choice((b"../outside/001", b"/etc/001", b"journals/\\ud800"))),
            raw.replace(b"}", b', "more": 1}', 1),
            raw.replace(b" ", b"", 1),
            raw + b"\n",
            raw.replace(b"journals", b"\xff\xfe", 1),
            raw[:-3] + b"\0\0\0",
        )
    )
    return package.built({**package.members, manifest.NAME: made, manifest.DIGEST: manifest.digest(made)})


def _lines(package: Package) -> list[bytes]:
    return package.members[JOURNAL].splitlines(keepends=True)


def edited_lines(package: Package, draw: random.Random) -> dict[str, bytes]:
    """The members with a journal in which a record was altered, removed, put in or moved."""
    lines = _lines(package)
    number = draw.randrange(1, len(lines) - 1)
    kind = draw.randrange(5)
    if kind == 0:
        lines[number] = lines[number].replace(
            b'"verdict":"', b'"verdict":"x' if draw.random() < 0.2 else b'"verdict": "'
        )
    elif kind == 1:
        record = json.loads(lines[number])
        record["compared"], record["reason"] = draw.randrange(1000), "edited"
        lines[number] = json.dumps(record).encode() + b"\n"
    elif kind == 2:
        del lines[number]
    elif kind == 3:
        lines.insert(
            number, draw.choice((lines[-2], b"\n", b"[]\n", b"[" * 5000 + b"\n", b'{"kind": "case"}\n', b"\xff\n"))
        )
    else:
        other = number % (len(lines) - 2) + 1
        lines[number], lines[other] = lines[other], lines[number]
    return {**package.members, JOURNAL: b"".join(lines)}


def edited(package: Package, draw: random.Random) -> bytes:
    return package.built(edited_lines(package, draw))


def edited_and_hashed(package: Package, draw: random.Random) -> bytes:
    """An edited journal with a recomputed manifest and the old chain."""
    return package.renewed(edited_lines(package, draw), chained=False)


def recomputed(package: Package, draw: random.Random) -> bytes:
    """An edited journal with everything recomputed: unsigned, only an invalid journal can be found."""
    lines = _lines(package)
    number = draw.randrange(1, len(lines) - 1)
    if draw.random() < 0.5:
        lines[number] = lines[number].replace(b'"compared":', b'"compared":1')
    else:
        del lines[number]
    return package.renewed({**package.members, JOURNAL: b"".join(lines)})


def unsigned(package: Package, draw: random.Random) -> bytes:
    """A package whose signature is gone; an unsigned one gets the signature of another manifest."""
    raw = package.members[manifest.NAME]
    members = {key: value for key, value in package.members.items() if key != manifest.SIGNATURE}
    if manifest.SIGNATURE in package.members:
        return package.built(members)
    rest = {key: value for key, value in members.items() if key != manifest.NAME}
    signature = signing.sign(raw + b" ", package.folder / "secret.key")
    return package.built({manifest.NAME: raw, manifest.SIGNATURE: signature, **rest})


MUTATIONS: tuple[Callable[[Package, random.Random], bytes], ...] = (
    *(flipped, truncated, lengthened, cut, inserted, swapped, exchanged, doubled, without, with_more, foreign, bomb),
    *(listed_otherwise, edited, edited_and_hashed, recomputed, unsigned),
)
NEED_A_KEY = frozenset({"recomputed", "unsigned"})
"""Mutations that nobody can find without the signer's public key."""


def packages(folder: Path) -> tuple[Package, Package]:
    """A package without a signature, and one with; the key is ``public.key``."""
    import minisign

    pair = minisign.KeyPair.generate()
    (folder / "secret.key").write_bytes(bytes(pair.secret_key) + b"\n")
    (folder / "public.key").write_bytes(bytes(pair.public_key) + b"\n")
    journal = folder / "journal.jsonl"
    header, *kept = STORED.read_bytes().splitlines(keepends=True)
    # Today's list and ledgers, since a package holds those that its runs name.
    ledgers = [
        {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()} for path in shipped(("cpu",))
    ]
    named = json.loads(header) | {"must_pass": {"cpu": must_pass.stored()["cpu"].facts()}, "ledgers": ledgers}
    journal.write_bytes(b"".join([json.dumps(named).encode() + b"\n", *kept[:RECORDS], kept[-1]]))
    log = folder / "build.log"
    log.write_bytes(b"built\n" * 40)
    made = []
    for key in (None, folder / "secret.key"):
        path = folder / "made.accelpack"
        packing.pack([journal], path, logs=[log], key=key)
        members = {member.name: _content(member.piece) for member in archive.walk(path, {})}
        made.append(Package(path.read_bytes(), members, folder))
    return made[0], made[1]


def _content(piece: Piece) -> bytes:
    return read(piece, archive.MOST_MEMBER)


def main(words: list[str]) -> int:
    """Mutate, verify, count; 1 where one was not found, or verify crashed or took too long."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    tried, caught, open_ones = Counter[str](), Counter[str](), Counter[str]()
    amiss: list[str] = []
    slowest = 0.0
    with tempfile.TemporaryDirectory(prefix="accelcheck-fuzz-") as name:
        folder = Path(name)
        key = folder / "public.key"
        plain, signed = packages(folder)
        target = folder / "mutated.accelpack"
        for package, public in ((plain, None), (signed, key)):
            target.write_bytes(package.raw)
            if not verify(target, public).intact:
                amiss.append("a package that nobody altered is found altered")
            draw = random.Random(given.seed)
            for index in range(given.count):
                mutation = MUTATIONS[index % len(MUTATIONS)]
                made = mutation(package, draw)
                if made == package.raw:
                    continue
                target.write_bytes(made)
                kind = f"{mutation.__name__}, {'signed' if public else 'not signed'}"
                tried[kind] += 1
                started = time.perf_counter()
                try:
                    seen = not verify(target, public).intact
                except NotPackageError:
                    seen = True
                except Exception as error:  # noqa: BLE001 - that it raises is what is looked for
                    amiss.append(f"mutation {index}, {kind}: verify raised {type(error).__name__}: {error}"[:500])
                    continue
                slowest = max(slowest, time.perf_counter() - started)
                caught[kind] += seen
                if not seen and (public or mutation.__name__ not in NEED_A_KEY):
                    amiss.append(f"mutation {index}, {kind}: not found")
                open_ones[kind] += not seen
    for kind in tried:
        print(f"{kind:32} {caught[kind]:5} of {tried[kind]:5} found")
    print(
        f"{tried.total()} mutated packages: {caught.total() + open_ones.total()} got a verdict, "
        f"{caught.total()} were found altered, "
        f"{open_ones.total()} cannot be told without a signature; "
        f"the slowest took {slowest:.2f} s (at most {SLOWEST:g})"
    )
    for line in amiss:
        print(line)
    return int(bool(amiss) or slowest > SLOWEST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
