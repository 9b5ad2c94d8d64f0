"""Finds a failure's causes in its faults, and in the texts of exceptions and stacks, which come from others. No torch.

Numbers, shapes, addresses, folders and the case's own names are left out, so that a fault reads the same in all cases.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from accelcheck.core.case import Verdict
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.journal import ErrorCode, Record
from accelcheck.expectations.ledger import exception

MOST_READ = 20_000
"""Most characters read of a reason and of a traceback; torch's messages with all registrations have 5,000."""
MOST_FAULTS = 400
"""Most faults read of a failure."""
MOST_TITLE = 160
"""Most characters of a title."""
HIDDEN = "…"
"""Placeholder of a number, a shape, an address or a name that differs from case to case."""


class Kind(StrEnum):
    """The kind of a cause."""

    OPERATOR = "missing operator"
    FEATURE = "missing feature"
    EXCEPTION = "exception"
    VALUES = "wrong values"
    METADATA = "wrong metadata"
    STATE = "changed state"
    RERUN = "not reproducible"
    EVIDENCE = "no evidence"
    CRASH = "crash"
    HANG = "hang"
    LOST = "device lost"
    REGRESSION = "regression"
    LIMIT = "limit"
    LEDGER = "ledger"
    UNCOLLECTED = "not collected"
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class Signature:
    """The cause of one fault of a record, with a title that all cases with this cause share.

    Wrong values have one of three titles, and `paths`: the wrong parts, such as ``outputs`` or ``running_var``. Their
    cause `accelcheck.report.causes` finds by comparing how many cases of each technique, workload and dtype fail.
    """

    kind: Kind
    title: str
    paths: frozenset[str] = frozenset()


_OPERATOR = r"['\"]?\b([A-Za-z_]\w{0,60}::[\w.]{1,80})['\"]?"
_DTYPES = {  # torch's C++ names
    "Half": "float16", "BFloat16": "bfloat16", "Float": "float32", "Double": "float64", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
}  # fmt: skip
_NO_KERNEL = re.compile(rf"Could not run {_OPERATOR} with arguments from the '(\w+)' backend")
_OVERRIDEABLE = re.compile(r"\b(\w{1,80}?)_overrideable not implemented")
_NO_DTYPE = re.compile(r"\"([\w:.<>, ]{1,80})\" not implemented for '(\w+)'")
_NOT_ON_DEVICE = re.compile(
    rf"[Oo]perator {_OPERATOR} is not (?:currently )?(?:implemented|supported)|"
    rf"{_OPERATOR} is not (?:currently |yet )?(?:implemented|supported)|"
    rf"(?:no kernel|not implemented|unsupported operator|no lowering)[\w ]{{0,20}}:? {_OPERATOR}",
    re.IGNORECASE,
)
_DEVICE_ERROR = re.compile(r"\b([A-Z][A-Za-z]{2,7} (?:driver )?error: [^\n.]{1,100})")
_MODULE = re.compile(r"\bNo module named '([\w.]{1,80})'")
_LIBRARY = re.compile(r"([\w.+-]{1,80}\.so[\w.]{0,20}): cannot open shared object file")
_STORAGE = re.compile(
    r"set the storage of a tensor on device|setStorage: |data pointer of (?:Storage|Tensor)|[Ii]nvalid python storage|"
    r"storage (?:has|does not have|on different device)|[Uu]ntyped_?[Ss]torage"
)
_PICKLE = re.compile(
    r"[Dd]on't know how to (?:determine|restore) data|[Cc]an(?:not|'t) (?:be )?pickle|(?:Unp|P)icklingError|pickled"
)
_AUTOCAST = re.compile(r"autocast[^\n]{0,80}(?:unsupported|not (?:supported|registered|implemented|available))|"
                       r"(?:unsupported|no|not supported)[^\n]{0,20} autocast", re.IGNORECASE)  # fmt: skip
_MEMORY = re.compile(r"[Oo]ut of memory\b|\bOutOfMemoryError\b|^MemoryError\b|Cannot allocate memory", re.MULTILINE)
_DISK = re.compile(r"No space left on device")
_ABSENT = re.compile(r"^(AttributeError: module '([\w.]+)' has no attribute '\w+')", re.MULTILINE)

_FRAME = re.compile(r'^[ \t]{0,20}File "([^"\n]{1,400})", line \d+,? in ([\w<>.]{1,120})', re.MULTILINE)
_THREAD = re.compile(r"^(Current thread|Thread) .{0,80}\(most recent call first\):", re.MULTILINE)
_PLACES = ("site-packages/", "dist-packages/")
_STANDARD = re.compile(r"/lib(?:64)?/python3\.\d+/|^<")

_RANDOM = ("rate", "scale", "lag", "likeness", "mask")


def signatures(record: Record) -> tuple[Signature, ...]:
    """Causes of a record that is not green; at least one."""
    if record.verdict is Verdict.XPASS:
        reasons = [known.reason for known in record.known] or [""]
        return tuple(Signature(Kind.LEDGER, _short(f"passes, and the ledger expects: {reason}")) for reason in reasons)
    if record.verdict is Verdict.FLAKY:
        inner = _signatures(record, record.runs[0] if record.runs else Verdict.ERROR)
        return tuple(Signature(known.kind, _short(f"not in each run: {known.title}"), known.paths) for known in inner)
    return _signatures(record, record.verdict)


def _signatures(record: Record, verdict: Verdict) -> tuple[Signature, ...]:
    text = record.reason[:MOST_READ]
    trace = record.traceback[-MOST_READ:]
    if verdict in {Verdict.CRASH, Verdict.HANG}:
        kind, how = (Kind.CRASH, record.code or "ended") if verdict is Verdict.CRASH else (Kind.HANG, "hangs")
        place = _place(trace)
        return (Signature(kind, _short(f"{how} in {place}" if place else f"{how}, without a stack")),)
    if verdict is Verdict.DEVICE_LOST:
        known = _known(text, trace)
        title = known.title if known is not None else _general(text.partition("\n")[2] or text, record)
        return (Signature(Kind.LOST, _short(f"the device is lost: {title}")),)
    if verdict is Verdict.FAIL:
        return tuple(dict.fromkeys(_faults(record))) or (Signature(Kind.VALUES, "a failure without a reason"),)
    if record.code in _UNPROVEN:
        kind, title = _UNPROVEN[record.code]
        return (Signature(kind, title or _short(_general(text, record))),)
    return (_error(record, text, trace),)


_UNPROVEN: Mapping[str, tuple[Kind, str]] = {
    ErrorCode.NO_EVIDENCE: (Kind.EVIDENCE, "gives no evidence that it ran"),
    ErrorCode.NOTHING_COMPARED: (Kind.EVIDENCE, "no element was compared"),
    ErrorCode.IMPLAUSIBLE: (Kind.EVIDENCE, "what was timed cannot have done the work"),
    ErrorCode.UNDECIDED: (Kind.EVIDENCE, ""),
    ErrorCode.NO_BASELINE: (Kind.REGRESSION, ""),
    ErrorCode.NOT_COLLECTED: (Kind.UNCOLLECTED, "a case of the must-pass list is not collected"),
}
"""Errors without an exception; an empty title stands for the first line of the reason."""


def _error(record: Record, text: str, trace: str = "") -> Signature:
    known = _known(text, trace)
    if known is not None:
        return known
    if text.startswith(_TORCHSCRIPT):  # the message stands at the end, which may be cut off
        title = f"{_general(text, record).partition(':')[0]} in {_place(text)}, in TorchScript"
    elif (absent := _ABSENT.search(text)) is not None:
        return Signature(Kind.FEATURE, _short(absent[0]))
    else:
        title = _general(text, record)
    kind = Kind.FEATURE if title.startswith("NotImplementedError") else Kind.EXCEPTION
    return Signature(kind, _short(title or "an error without a reason"))


_TORCHSCRIPT = tuple(
    f"{name}: The following operation failed in the TorchScript interpreter"
    for name in ("RuntimeError", "NotImplementedError", "IndexError", "ValueError", "TypeError")
)


def _known(text: str, trace: str) -> Signature | None:
    """Find a fault that torch or the operating system words the same way everywhere."""
    # Lines of source code stand indented in a traceback, and may hold the text of an error that was not raised.
    message = "\n".join([text, *(line for line in trace.splitlines() if line[:1] not in {"", " ", "\t"})])
    if (signature := _kernel(message)) is not None:
        return signature
    for word, pattern, kind, title in _WORDED:
        if word in message and (match := pattern.search(message)) is not None:
            return Signature(kind, _short(title.format(*match.groups())))
    return None


def _kernel(text: str) -> Signature | None:
    if (match := _NO_KERNEL.search(text)) is not None:
        operator, key = match.groups()
        if key.startswith("Autocast"):
            return Signature(Kind.FEATURE, "autocast is not registered")
        special = next((f"{name.lower()} " for name in _KEYS if key.startswith(name)), "")
        return Signature(Kind.OPERATOR, f"{operator}: no {special}kernel")
    if (match := _NO_DTYPE.search(text)) is not None:
        return Signature(Kind.OPERATOR, f"{match[1]}: no kernel for {_DTYPES.get(match[2], match[2])}")
    operator = ""
    if "_overrideable" in text and (match := _OVERRIDEABLE.search(text)) is not None:
        operator = f"aten::{match[1]}"
    elif "::" in text and (match := _NOT_ON_DEVICE.search(text)) is not None:
        operator = next(filter(None, match.groups()))
    return Signature(Kind.OPERATOR, f"{operator}: no kernel") if operator else None


_KEYS = ("Autograd", "Sparse", "Quantized", "Nested")
"""Dispatch keys for which a device has kernels of their own."""


_WORDED = (
    ("utocast", _AUTOCAST, Kind.FEATURE, "autocast is not registered"),
    ("", _PICKLE, Kind.FEATURE, "storages cannot be saved"),
    ("", _STORAGE, Kind.FEATURE, "storages cannot be copied or shared"),
    ("emory", _MEMORY, Kind.ENVIRONMENT, "out of memory"),
    ("", _DISK, Kind.ENVIRONMENT, "no space left on the disk"),
    ("", _MODULE, Kind.ENVIRONMENT, "the module {} is missing"),
    (".so", _LIBRARY, Kind.ENVIRONMENT, "the library {} is missing"),
    ("", _DEVICE_ERROR, Kind.EXCEPTION, "{}"),
)
"""Words without which a text is not searched, what is then searched for, and kind and title of the cause."""


def _place(trace: str) -> str:
    """Innermost frame of a stack outside of Python's standard library; empty where there is none."""
    threads = list(_THREAD.finditer(trace))
    if threads:  # faulthandler's, the innermost frame first; the main thread is the last one
        ends = [*(m.start() for m in threads[1:]), len(trace)]
        stacks = [(m[1], _FRAME.findall(trace[m.end() : end])) for m, end in zip(threads, ends, strict=True)]
        stacks = [stack for stack in stacks if stack[1]]  # a thread of native code has no frames of Python's
        frames = next((own for name, own in stacks if name == "Current thread"), stacks[-1][1] if stacks else [])
    else:
        frames = _FRAME.findall(trace)[::-1]
    for path, function in frames:
        if not _STANDARD.search(path) or any(place in path for place in _PLACES):
            return f"{function} ({_module(path)})"
    return f"{frames[0][1]} ({_module(frames[0][0])})" if frames else ""


def _module(path: str) -> str:
    """Cut a path down to the part that is the same on every machine."""
    for place in _PLACES:
        if place in path:
            return path.rpartition(place)[2]
    parts = path.split("/")
    return "/".join(parts[parts.index("accelcheck") :]) if "accelcheck" in parts else parts[-1]


def _faults(record: Record) -> Iterator[Signature]:
    """Causes named by the faults of a `fail`."""
    grown = {known.fault for known in record.known}
    for known in record.known:
        yield Signature(Kind.LEDGER, _short(f"more than the ledger expects: {known.reason}"))
    unexpected = [_fault(record, fault) for fault in record.faults[:MOST_FAULTS] if fault not in grown]
    yield from (signature for signature in unexpected if not signature.paths)
    yield from _merged([signature for signature in unexpected if signature.paths])


def _merged(values: list[Signature]) -> Iterator[Signature]:
    """Make one signature of all wrong values, and one of the buffers.

    Buffers come from the forward pass alone, so wrong outputs explain them, and wrong gradients do not.
    """
    outputs = any("outputs" in signature.paths for signature in values)
    for part in (SHARED, None):
        chosen = [signature for signature in values if part is None or outputs or signature.paths & part]
        values = [signature for signature in values if signature not in chosen]
        if chosen:
            title = min((signature.title for signature in chosen), key=_WRONG.index)
            yield Signature(Kind.VALUES, title, frozenset[str]().union(*(signature.paths for signature in chosen)))


SHARED = frozenset({"outputs", "gradients", "losses", "parameters"})
"""Parts of a result that every operator of a workload may spoil."""
_WRONG = ("random numbers are wrong", "wrong values", "wrong NaN or infinity")
"""Titles of wrong values, the first of which counts, since wrong numbers may overflow."""


def _fault(record: Record, fault: Fault) -> Signature:
    """Cause of one fault; the title is one of `_WRONG`, and there is a path, where values are wrong."""
    if fault.kind is FaultKind.RAISED:
        return _error(record, exception(fault))
    if fault.kind is FaultKind.EVIDENCE and fault.view:
        return Signature(Kind.OPERATOR, _short(f"{fault.view}: no kernel, runs on the CPU"))
    if fault.kind not in _NAMED:
        return Signature(Kind.VALUES, _short(_general(str(fault), record)))
    kind, named = _NAMED[fault.kind]
    title = _short(named(fault, record))
    return Signature(kind, title, frozenset({_leaf(fault.path)}) if title in _WRONG else frozenset())


_NAMED: Mapping[FaultKind, tuple[Kind, Callable[[Fault, Record], str]]] = {
    FaultKind.VIEW: (Kind.VALUES, lambda fault, _: _WRONG[fault.view.partition(" ")[0] not in _RANDOM]),
    FaultKind.VALUE: (Kind.VALUES, lambda *_: _WRONG[1]),
    FaultKind.PATTERN: (Kind.VALUES, lambda *_: _WRONG[2]),
    FaultKind.METADATA: (Kind.METADATA, lambda fault, _: _metadata(fault)),
    FaultKind.STATE: (
        Kind.STATE,
        lambda fault, record: f"global state is left changed: {_general(fault.path, record)}",
    ),
    FaultKind.MUTATED: (
        Kind.STATE,
        lambda fault, _: f"{'a parameter' if fault.path.startswith('parameter') else 'an input'} is overwritten",
    ),
    FaultKind.RERUN: (Kind.RERUN, lambda *_: "a second run gives other bits"),
    FaultKind.EVIDENCE: (Kind.EVIDENCE, lambda fault, record: f"not seen: {_general(fault.path, record, least=2)}"),
    FaultKind.REGRESSION: (
        Kind.REGRESSION,
        lambda fault, _: "more memory than the baseline" if fault.view == "memory" else "slower than the baseline",
    ),
    FaultKind.LIMIT: (Kind.LIMIT, lambda fault, _: f"beyond a limit: {fault.expected}"),
}
"""Kind and title of the cause, by kind of fault."""


def _metadata(fault: Fault) -> str:
    leaf = _leaf(fault.path)
    return f"{fault.view}: {leaf}" if fault.view in {"missing", "unexpected"} else f"wrong {fault.view} of {leaf}"


def _leaf(path: str) -> str:
    """Class of a path: outputs, gradients, losses, parameters; a buffer's own name."""
    kind, _, name = path.partition(":")
    if kind == "buffer":
        return name.partition("@")[0].partition(" ")[0].rpartition(".")[2]
    for prefix, called in _LEAVES.items():
        if kind.startswith(prefix):
            return called
    return _HIDE_NUMBER.sub(HIDDEN, kind.partition(" ")[0].partition("[")[0])


_LEAVES = {"out": "outputs", "grad": "gradients", "loss": "losses", "norm": "gradients", "parameter": "parameters"}
_HIDE_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d_]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])", re.IGNORECASE)
_HIDE_LONG_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d_.]+(?:e[-+]?\d+)?(?![\w])", re.IGNORECASE)
_HIDE = (
    re.compile(r"\b0x[0-9a-fA-F]+\b"),
    re.compile(r"(?:torch\.Size\()?[\[(]\s*(?:-?\d+(?:,\s*|\s*(?=[\])])))+[\])]\)?"),  # shapes, strides, ranges
    re.compile(r"\btorch\.(?:b?float|u?int|complex|bool)\w*"),
    re.compile(r"(?:/[\w.@+-]+){2,}"),
)


def _general(text: str, record: Record, least: int = 1) -> str:
    """First line of a text without parts that differ from case to case; numbers of fewer than `least` digits stay."""
    line = next((text_line for text_line in text.splitlines() if text_line.strip()), "")[:1000]
    for pattern in _HIDE:
        line = pattern.sub(HIDDEN, line)
    case = record.case
    for name in sorted({case.id, case.technique, case.workload, case.device, case.dtype}, key=len, reverse=True):
        if name and name in line:
            line = re.sub(rf"(?<![\w:.]){re.escape(name)}(?![\w])", HIDDEN, line)
    return (_HIDE_NUMBER if least == 1 else _HIDE_LONG_NUMBER).sub(HIDDEN, line)


def _short(title: str) -> str:
    line = " ".join(title.split())
    return line if len(line) <= MOST_TITLE else f"{line[: MOST_TITLE - 1]}{HIDDEN}"
