"""Tries operations on a device one by one: each is right, wrong, or absent."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from accelcheck.checks.trial import Finding
from accelcheck.core.capability import Code, unsupported
from accelcheck.core.case import Evidence
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.plain import text
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Unsupported
from accelcheck.verify.number_formats import FORMATS, Format, Value

REFUSAL = re.compile(
    r"\bnot (yet |currently )?(been )?(implemented|supported|available)|unsupported|un(known|recognized) dtype"
    r"|(n't|cannot|only|not) (be )?(support|convert)|only (be )?supported|could not run|no kernel|unimplemented"
    r"|invalid dtype|has no attribute",
    re.IGNORECASE,
)
"""Pattern of exception texts about an operation that a backend lacks. Other exceptions are errors: `Tries.attempt`."""
MOST_TEXT = 160
"""Longest exception text that evidence quotes, in characters."""

Accepted = tuple["Value", ...]
"""Right values of an element; empty if it is not judged."""


@dataclass
class Tries:
    """Tried operations of one item, on an opened device.

    Attributes:
        label: First word of each operation's name, such as ``int8``.
        evidence, faults, compared: The same as in `Finding`.
        refused: Messages of the device, by operations that it does not have.
        right: Operations that gave the right values.
    """

    device: Device
    label: str
    evidence: list[Evidence] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    compared: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    right: list[str] = field(default_factory=list)

    def attempt(self, name: str, work: Callable[[], Tensor], dtype: str, expected: Sequence[Accepted]) -> bool:
        """Tries an operation, and compares dtype and values with the right ones of each element, in order.

        Returns:
            True if it is right; an absent operation is no fault.
        """
        read = self._read(name, work, dtype)
        if read is None:
            return False
        codes, values = read
        if len(values) != len(expected):
            return self._misshapen(name, "shape", f"{len(expected)} elements", str(len(values)))
        pairs = enumerate(zip(values, expected, strict=True))
        wrong = [index for index, (value, accepted) in pairs if accepted and value not in accepted]
        sides = (_said(expected[wrong[0]][0]), _said(values[wrong[0]])) if wrong else None
        return self._compared(name, sum(map(bool, expected)), wrong, sides, len(codes))

    def bits(self, name: str, work: Callable[[], Tensor], dtype: str, expected: Sequence[int]) -> bool:
        """Tries an operation and compares bit patterns: only NaN may have any."""
        read = self._read(name, work, dtype)
        if read is None:
            return False
        codes, values = read
        if len(codes) != len(expected):
            return self._misshapen(name, "shape", f"{len(expected)} elements", str(len(codes)))
        form = FORMATS.get(dtype)
        wrong = [
            index
            for index, (code, owed) in enumerate(zip(codes, expected, strict=True))
            if code != owed and not (form is not None and values[index] == "nan" == form.decode(owed))
        ]
        sides = (f"{expected[wrong[0]]:#x}", f"{codes[wrong[0]]:#x}") if wrong else None
        return self._compared(name, len(expected), wrong, sides, len(codes))

    def finding(self) -> Finding:
        """Returns the outcome."""
        return Finding(self.evidence, self.faults, (), self.compared)

    def note(self, claim: str, observed: str | int) -> None:
        """Adds an observation that decides nothing."""
        self.evidence.append(Evidence(f"{self.label}: {claim}", observed, engaged=True))

    def _read(self, name: str, work: Callable[[], Tensor], dtype: str) -> tuple[list[int], list[Value]] | None:
        """Returns bit patterns and values of a result; None where there is none, which is recorded."""
        self.device.reset_fallbacks()
        try:
            result = work()
            self.device.synchronize()
            host = result.cpu()
        except Exception as error:
            reason = f"{type(error).__name__}: {text(error)}".partition("\n")[0][:MOST_TEXT]
            if not isinstance(error, NotImplementedError | TypeError) and not REFUSAL.search(text(error)):
                error.add_note(f"{self.label} {name}")
                raise
            self._absent(name, reason)
            return None
        if fallen := self.device.fallbacks():
            self._absent(name, f"ran on the CPU: {', '.join(sorted(fallen))}")
            return None
        if result.device.type != self.device.type:
            self._misshapen(name, "device", self.device.type, result.device.type)
            return None
        if result.dtype != getattr(torch, dtype):
            self._misshapen(name, "dtype", dtype, str(result.dtype).removeprefix("torch."))
            return None
        codes = patterns(host)
        form = FORMATS.get(dtype)
        return codes, [Fraction(code) if form is None else form.decode(code) for code in codes]

    def _absent(self, name: str, reason: str) -> None:
        self.refused[name] = reason
        self.note(name, f"not there: {reason}")

    def _misshapen(self, name: str, part: str, expected: str, got: str) -> bool:
        return self._wrong(name, Fault(FaultKind.METADATA, f"{self.label} {name}", part, "", expected, got))

    def _wrong(self, name: str, fault: Fault) -> bool:
        self.faults.append(fault)
        reason = f"wrong {fault.view or fault.kind}: {fault.got}"
        self.evidence.append(Evidence(f"{self.label}: {name}", reason, engaged=True))
        return False

    def _compared(self, name: str, judged: int, wrong: list[int], sides: tuple[str, str] | None, count: int) -> bool:
        self.compared += judged
        if sides is not None:
            place = f"[{wrong[0]}]"
            got = f"{sides[1]}; {len(wrong)} of {count} elements differ"
            fault = Fault(FaultKind.VALUE, f"{self.label} {name}", expected=sides[0], got=got, place=place)
            return self._wrong(f"{name}{place}", fault)
        self.right.append(name)
        self.evidence.append(Evidence(f"{self.label}: {name}", f"right in all {judged} elements", engaged=True))
        return True


def absent(tries: Tries, needed: Sequence[str]) -> list[str]:
    """Lists needed operations that the device lacks, with the reasons."""
    return [f"{name}: {tries.refused[name]}" for name in needed if name in tries.refused]


def refuse(label: str, device: Device, reasons: Sequence[str]) -> Unsupported:
    """Makes the answer for an absent dtype."""
    more = f"; and {len(reasons) - 1} more operations" if len(reasons) > 1 else ""
    return Unsupported(unsupported(Code.NO_DTYPE, f"{device.name} has no {label}: {reasons[0]}{more}", tried=True))


def patterns(host: Tensor) -> list[int]:
    """Reads the bit pattern of each element of a CPU tensor from its bytes, without operations of torch."""
    width = host.element_size()
    data = bytes(host.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return [int.from_bytes(data[start : start + width], "little") for start in range(0, len(data), width)]


def of_patterns(codes: Sequence[int], form: Format, dtype: torch.dtype) -> Tensor:
    """Makes a CPU tensor of bit patterns."""
    width = form.bits // 8
    data = bytearray(b"".join((code & (1 << form.bits) - 1).to_bytes(width, "little") for code in codes))
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype)


def _said(value: Value) -> str:
    if isinstance(value, str):
        return value
    return str(value.numerator) if value.denominator == 1 and abs(value) < 1 << 64 else repr(float(value))
