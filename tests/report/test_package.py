"""A package holds what a run was judged by, has the same bytes everywhere, and says by name what was altered in it."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
from pathlib import Path
from typing import Any

import journal_harness
import pytest
from msgspec.structs import replace

from accelcheck import cli
from accelcheck.core.bounded import Piece, UnreadableFileError, lines, read
from accelcheck.core.case import LEVELS, Case, Mode, Verdict
from accelcheck.core.journal import JournalError, Record
from accelcheck.devices.base import Fingerprint
from accelcheck.expectations import must_pass
from accelcheck.expectations.ledger import shipped
from accelcheck.expectations.must_pass import Floor, MustPass
from accelcheck.plugin import configuration
from accelcheck.report.package import archive, chain, manifest, signing
from accelcheck.report.package.archive import NotPackageError
from accelcheck.report.package.packing import PackError, pack
from accelcheck.report.package.verifying import UNSIGNED, verify

EPYC = Fingerprint("cpu", "AMD EPYC", 2, versions={"torch": "2.13.0"})


def used(path: Path) -> dict[str, str]:
    return {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def journal(path: Path, *verdicts: Verdict, **facts: Any) -> Path:
    known = {"ledgers": [used(ledger) for ledger in shipped(("cpu",))], "packages": {"torch": "2.13.0"}}
    cases = [Case(f"technique-{index}", "mlp", "cpu", "float32", Mode.FORWARD, 1) for index in range(3)]
    records = [
        Record(case, verdict, compared=1) for case, verdict in zip(cases, verdicts or (Verdict.PASS,) * 3, strict=False)
    ]
    return journal_harness.journal(path, *records, **known | facts)


@pytest.fixture(autouse=True)
def small_list(monkeypatch: pytest.MonkeyPatch) -> MustPass:
    """A must-pass list of the cases of `journal`."""
    floors = {level: Floor(2, 2, 0) for level in LEVELS}
    keys = {f"technique-{index}/mlp/float32/forward": 1 for index in range(3)}
    small = must_pass.parsed("accelerator", must_pass.written(1, 1, keys, floors))
    monkeypatch.setattr(must_pass, "stored", lambda: {"accelerator": small})
    return small


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return tmp_path / "made.accelpack"


def altered(package: Path, old: bytes, new: bytes) -> None:
    raw = package.read_bytes()
    assert len(old) == len(new)
    assert old in raw
    package.write_bytes(raw.replace(old, new, 1))


def test_a_package_holds_what_the_run_was_judged_by_and_is_intact(tmp_path: Path, package: Path) -> None:
    log = tmp_path / "build log.txt"
    log.write_text("built")
    packed = pack([journal(tmp_path / "a.jsonl")], package, logs=[log], files=[log])
    names = [member.name for member in packed.manifest.members]
    assert names == sorted(names)
    assert {name.partition("-")[2] for name in names if name.startswith("ledgers/")} == {"all.toml", "cpu.toml"}
    assert f"logs/{hashlib.sha256(b'built').hexdigest()[:12]}-build_log.txt" in names
    verification = verify(package)
    assert (verification.altered, verification.signature, verification.digest) == ([], UNSIGNED, packed.digest)
    assert verification.qualifies
    assert verification.runs[0].packages == {"torch": "2.13.0"}


def test_the_same_input_gives_the_same_bytes_wherever_it_lies(tmp_path: Path, package: Path) -> None:
    paths = [journal(tmp_path / "a.jsonl"), journal(tmp_path / "b.jsonl", started="2026-11-23T09:00:00+00:00")]
    pack(paths, package)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = [Path(shutil.move(path, elsewhere / f"other-{path.name}")) for path in paths]
    pack(moved[::-1], elsewhere / "made.accelpack")
    assert (elsewhere / "made.accelpack").read_bytes() == package.read_bytes()
    assert str(tmp_path).encode() not in package.read_bytes()


def test_the_layout_is_that_of_tar_with_nothing_left_to_choose(package: Path) -> None:
    with package.open("wb") as file:
        archive.write(file, [("a.txt", 3, [b"a", b"bc"]), ("b/c.txt", 0, [])])
    assert hashlib.sha256(package.read_bytes()).hexdigest() == (
        "5d6f75e32710afb5a24fb0dabb864b061e98e444afdac279b573ef3d16122891"
    )
    with tarfile.open(package) as read_back:
        assert read_back.getnames() == ["a.txt", "b/c.txt"]


def test_a_journal_that_is_given_twice_is_packed_once(tmp_path: Path, package: Path) -> None:
    path = journal(tmp_path / "a.jsonl")
    packed = pack([path, path], package)
    assert packed.notes == (f"{path}: taken once: the same as {path}",)
    assert len(packed.manifest.journals) == 1


def test_a_ledger_is_found_by_its_hash_or_missing_by_name(tmp_path: Path, package: Path) -> None:
    own = tmp_path / "ours" / "known.toml"
    own.parent.mkdir()
    own.write_text("schema = 2\n")
    path = journal(tmp_path / "a.jsonl", ledgers=[used(own)])
    with pytest.raises(PackError, match=r"ledger known\.toml, .*: there is no such file; give the file with --ledger"):
        pack([path], package)
    assert not package.exists()
    pack([path], package, ledger=[own])
    assert verify(package).intact
    own.write_text("schema = 2\n# changed since\n")
    with pytest.raises(PackError, match=rf"known\.toml has the SHA-256 {used(own)['sha256']} now"):
        pack([path], package, ledger=[own])
    packed = pack([path], package, ledger=[own], allow_missing=True)
    verification = verify(package)
    assert verification.intact
    assert any("ledger known.toml" in note for note in verification.notes)
    assert str(tmp_path) not in "".join(packed.manifest.missing)


def test_a_ledger_beside_the_journal_is_found(tmp_path: Path, package: Path) -> None:
    (tmp_path / "known.toml").write_text("schema = 2\n")
    pack([journal(tmp_path / "a.jsonl", ledgers=[used(tmp_path / "known.toml")])], package)
    assert any("known.toml" in member.name for member in archive.walk(package, {}))


def test_the_must_pass_list_of_a_run_is_packed_and_another_one_here_is_said(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(must_pass.__file__).parent / must_pass.FOLDER
    facts = must_pass.parsed("cpu", (folder / "cpu.txt").read_text()).facts()
    packed = pack([journal(tmp_path / "a.jsonl", must_pass={"cpu": facts})], package)
    assert [m.name for m in packed.manifest.members if m.name.startswith("must-pass/")] == [
        f"must-pass/{str(facts['sha256'])[:12]}-cpu.txt"
    ]
    verification = verify(package)
    assert verification.intact
    (note,) = verification.notes
    assert note.startswith(f"cpu: the run named version {facts['version']} of the must-pass list cpu; this accelcheck")
    assert note.endswith("version 1 of accelerator")
    other = journal(tmp_path / "b.jsonl", must_pass={"cpu": facts | {"sha256": "0000"}})
    with pytest.raises(PackError, match=r"list cpu\.txt, which a run used with the SHA-256 0000: .*has the SHA-256"):
        pack([other], package)


def test_a_malformed_journal_is_not_packed(tmp_path: Path, package: Path) -> None:
    path = journal(tmp_path / "a.jsonl")
    path.write_text(path.read_text().replace('"verdict":"pass"', '"verdict":"fine"', 1))
    with pytest.raises(JournalError, match=r"a\.jsonl:2: not a case record"):
        pack([path], package)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(JournalError, match="without a whole line"):
        pack([tmp_path / "empty.jsonl"], package)


def test_an_input_is_never_written_over(tmp_path: Path) -> None:
    path = journal(tmp_path / "a.jsonl")
    with pytest.raises(PackError, match="is one of the files that are packed"):
        pack([path], path)


def test_an_altered_record_is_named(tmp_path: Path, package: Path) -> None:
    pack([journal(tmp_path / "a.jsonl", Verdict.PASS, Verdict.FAIL, Verdict.PASS)], package)
    altered(package, b'"verdict":"fail"', b'"verdict":"pass"')
    verification = verify(package)
    name = f"{package}/journals/001.jsonl"
    assert verification.altered == [
        "journals/001.jsonl: altered: its SHA-256 is not that of the manifest",
        f"{name}:3: technique-1/mlp/cpu/float32/forward: altered",
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda kept: kept.pop(2), ":3: technique-1/mlp/cpu/float32/forward: removed"),
        (
            lambda kept: kept.insert(2, kept[1].replace(b"technique-0", b"new")),
            ":3: new/mlp/cpu/float32/forward: put in",
        ),
        (
            lambda kept: kept.insert(2, kept.pop(3)),
            "technique-2/mlp/cpu/float32/forward: the first line that is out of order",
        ),
        (lambda kept: kept.pop(), ":5: end: removed"),
        (lambda kept: kept.insert(1, kept[2]), ":4: technique-1/mlp/cpu/float32/forward: put in"),
    ],
)
def test_records_that_were_removed_put_in_or_moved_are_named(change: Any, said: str, tmp_path: Path) -> None:
    path = journal(tmp_path / "a.jsonl")
    (tmp_path / "chain").write_bytes(b"".join(map(chain.encode, chain.links(path))))
    assert chain.differences(path, tmp_path / "chain")[0] == []
    kept = path.read_bytes().splitlines(keepends=True)
    change(kept)
    path.write_bytes(b"".join(kept))
    differing, count, _ = chain.differences(path, tmp_path / "chain")
    assert len(differing) == 1
    assert differing[0].endswith(said)
    assert count == len(kept)


def test_the_chain_is_that_of_the_documentation(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"kind": "run"}\ntorn')
    digest = hashlib.sha256(bytes(32) + b'{"kind": "run"}').digest()
    two = hashlib.sha256(digest + b"torn").hexdigest()
    assert [*chain.links(path)] == [
        (digest.hex(), hashlib.sha256(b'{"kind": "run"}').hexdigest(), "run"),
        (two, hashlib.sha256(b"torn").hexdigest(), "a line that is no record"),
    ]


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "a file that begins with something else"),
        (b'{"kind": "run"}\n' * 100, "a file that begins with something else"),
        (b"\x1f\x8b" + bytes(600), "a gzip file"),
        (b"PK\x03\x04" + bytes(600), "a zip file"),
    ],
)
def test_another_file_is_no_package(raw: bytes, said: str, package: Path) -> None:
    package.write_bytes(raw)
    with pytest.raises(NotPackageError, match=said):
        verify(package)


def test_links_devices_and_names_that_lead_out_are_refused(tmp_path: Path, package: Path) -> None:
    pack([journal(tmp_path / "a.jsonl")], package)
    for info_type, linked, message in (
        (tarfile.SYMTYPE, "/etc/passwd", "is a symbolic link"),
        (tarfile.LNKTYPE, "manifest.json", "is a hard link"),
        (tarfile.CHRTYPE, "", "is a device"),
        (tarfile.REGTYPE, "", "has a name that no member may have"),
    ):
        info = tarfile.TarInfo("/etc/shadow" if not linked and info_type == tarfile.REGTYPE else "x")
        info.type, info.linkname = info_type, linked
        raw = package.read_bytes()
        more = tmp_path / "more.accelpack"
        more.write_bytes(raw[: -2 * archive.BLOCK] + info.tobuf(tarfile.USTAR_FORMAT) + bytes(2 * archive.BLOCK))
        assert any(message in line for line in verify(more).altered)


@pytest.mark.parametrize(
    "name", ["/a", "../a", "a/../b", "a/b/c", "", ".", "..", ".a", "a\\b", "a b", "a\n", "é", "a" * 101]
)
def test_names_outside_of_the_archive_are_not_legal(name: str) -> None:
    assert not archive.legal(name)


def test_a_deeply_nested_manifest_is_refused_with_its_reason(tmp_path: Path, package: Path) -> None:
    raw = b"[" * 200_000
    with package.open("wb") as file:
        archive.write(file, [(manifest.NAME, len(raw), [raw])])
    assert verify(package).altered[0].startswith("manifest.json: cannot be read:")


def test_a_package_ends_after_its_last_member(tmp_path: Path, package: Path) -> None:
    pack([journal(tmp_path / "a.jsonl")], package)
    raw = package.read_bytes()
    package.write_bytes(raw + b"more")
    assert verify(package).altered == ["4 bytes more than expected after its last member, or altered ones"]
    package.write_bytes(raw[:-600])
    assert verify(package).altered == [f"the file was cut off at byte {len(raw) - 600:,}"]


@pytest.mark.parametrize(("member", "size"), [(0, 2**40), (1, 2**40), (2, 2**40), (1, -1), (2, -1)])
def test_a_size_that_no_such_header_has_is_an_alteration(member: int, size: int, tmp_path: Path, package: Path) -> None:
    pack([journal(tmp_path / "a.jsonl")], package)
    start = [*archive.walk(package, {})][member].piece.start - archive.BLOCK
    raw = bytearray(package.read_bytes())
    info = tarfile.TarInfo.frombuf(raw[start : start + archive.BLOCK], "ascii", "strict")
    info.size = size
    raw[start : start + archive.BLOCK] = info.tobuf(tarfile.GNU_FORMAT)
    package.write_bytes(raw)
    assert not verify(package).intact


def again(package: Path, change: Any) -> None:
    """The package with another manifest, and with all hashes anew."""
    pieces = {part.name: part.piece for part in archive.walk(package, {})}
    known = manifest.decode(read(pieces.pop(manifest.NAME), manifest.MOST))
    del pieces[manifest.DIGEST]
    raw = manifest.encode(change(known))
    kept = [(manifest.NAME, raw), (manifest.DIGEST, manifest.digest(raw))]
    kept += [(name, read(piece, piece.size)) for name, piece in pieces.items()]
    with (package.parent / "again").open("wb") as file:
        archive.write(file, [(name, len(content), [content]) for name, content in kept])
    (package.parent / "again").replace(package)


def test_a_journal_is_listed_once_so_that_no_manifest_asks_for_endless_reading(tmp_path: Path, package: Path) -> None:
    pack([journal(tmp_path / "a.jsonl")], package)
    again(package, lambda known: replace(known, journals=known.journals * 2))
    assert verify(package).altered == ["manifest.json: field 'journals': journals/001.jsonl is there twice"]


def test_a_journal_cannot_be_in_a_package_unread(tmp_path: Path, package: Path) -> None:
    later = journal(tmp_path / "b.jsonl", Verdict.FAIL, started="2026-11-24T10:00:00+00:00")
    pack([journal(tmp_path / "a.jsonl"), later], package)
    again(package, lambda known: replace(known, journals=known.journals[:1]))
    assert verify(package).altered == [
        "manifest.json: field 'journals': chains/002.jsonl is among the members and not there: it would not be read"
    ]


def test_a_member_has_the_size_that_the_manifest_says(tmp_path: Path, package: Path) -> None:
    pack([journal(tmp_path / "a.jsonl")], package)

    def longer(known: manifest.Manifest) -> manifest.Manifest:
        first, *rest = known.members
        return replace(known, members=(replace(first, size=first.size + 5), *rest))

    again(package, longer)
    (message,) = verify(package).altered
    assert "bytes, and the manifest says" in message


def test_signatures_show_what_hashes_cannot(tmp_path: Path, package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    minisign = pytest.importorskip("minisign")
    pair, other = minisign.KeyPair.generate(), minisign.KeyPair.generate()
    for name, key in (("secret", pair.secret_key), ("public", pair.public_key), ("other", other.public_key)):
        (tmp_path / name).write_bytes(bytes(key) + b"\n")
    path = journal(tmp_path / "a.jsonl")
    words = ["verify", str(package), "--key", str(tmp_path / "public")]
    pack([path], package, key=tmp_path / "secret")
    signed = package.read_bytes()
    pack([path], package, key=tmp_path / "secret")
    assert package.read_bytes() == signed
    assert cli.main(words) == 0
    assert f"signature: holds, by the key {pair.public_key.to_base64().decode()}" in capsys.readouterr().out
    assert verify(package).signature == "not checked: give the signer's public key with --key"
    assert "incompatible key" in verify(package, tmp_path / "other").signature
    pack([path], package)
    assert cli.main(words) == 1
    assert "missing: the package is not signed, and a key was given" in capsys.readouterr().out
    assert cli.main(["verify", str(package), "--key", str(path)]) == 4


def test_without_the_extra_the_command_that_installs_it_is_said(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signing, "available", lambda: signing.INSTALL)
    path = journal(tmp_path / "a.jsonl")
    assert cli.main(["pack", str(path), "-o", str(package), "--sign", str(path)]) == 4
    assert "pip install 'accelcheck[sign]'" in capsys.readouterr().err
    assert not package.exists()


def test_the_commands_say_what_they_found(tmp_path: Path, package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = journal(tmp_path / "a.jsonl", Verdict.PASS, Verdict.FAIL)
    assert cli.main(["pack", str(path), "-o", str(package)]) == 0
    assert "1 journals with 4 lines" in capsys.readouterr().out
    assert cli.main(["verify", str(package)]) == 1
    printed = capsys.readouterr().out
    assert "as it was packed" in printed
    assert "cpu: 1 fail, 1 pass\n  cpu does not qualify at level 1: 1 of 3 cases of the must-pass list" in printed
    assert "    1 must-pass cases are in no journal: technique-2/mlp/cpu/float32/forward" in printed
    assert cli.main(["verify", str(path)]) == 4
    assert "expected a package" in capsys.readouterr().err
    assert cli.main(["pack", str(tmp_path / "none"), "-o", str(package)]) == 4


def test_nothing_is_written_when_a_package_is_verified(tmp_path: Path, package: Path) -> None:
    pack([journal(tmp_path / "a.jsonl")], package)
    before = sorted(tmp_path.rglob("*"))
    verify(package)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["verify", str(tmp_path)], ["merge", str(tmp_path), "-o", str(tmp_path / "m")]):
        assert cli.main(words) == 4
        assert f"{tmp_path} cannot be read: expected a file, got a folder" in capsys.readouterr().err


def test_a_piece_of_a_file_is_read_as_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123\n567\n9")
    assert [*lines(Piece(path, 2, 6, "piece"))] == [(1, b"23\n"), (2, b"567")]
    assert read(Piece(path, 8, 100, "piece"), 100) == b"\n9"
    with pytest.raises(UnreadableFileError, match="piece cannot be read: expected at most 3 bytes, got 4"):
        read(Piece(path, 0, 4, "piece"), 3)


def test_a_journal_names_packages_and_ledgers() -> None:
    versions = configuration.packages()
    assert versions["torch"].startswith("2.")
    assert list(versions) == sorted(versions)
    import importlib.metadata

    assert {name.lower() for name in versions} == {
        distribution.metadata["Name"].lower()
        for distribution in importlib.metadata.distributions()
        if distribution.metadata["Name"]
    }


def test_headers_of_a_real_run_name_their_ledgers(tmp_path: Path) -> None:
    class Run:
        selection = type("Selection", (), {"devices": ("cpu",)})()
        ledgers = (tmp_path / "known.toml",)

    (tmp_path / "known.toml").write_text("schema = 2\n")
    named = configuration.RunConfiguration.inputs(Run())["ledgers"]  # type: ignore[arg-type]  # all that is read
    assert named == [used(path) for path in (*shipped(("cpu",)), tmp_path / "known.toml")]
