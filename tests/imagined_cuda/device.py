"""An imagined CUDA device in this process: builds device.cpp on first use and loads it. Call `load()` before torch."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import types
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCES = ("device.cpp", "memory.h", "clocks.h")
NAME = "imagined_cuda_device"
CARDS = 8


def build() -> Path:
    """The compiled device, made if this source with this torch has none yet (half a minute)."""
    torch = torch_folder()
    text = "".join((HERE / name).read_text() for name in SOURCES) + (torch / "version.py").read_text() + sys.version
    folder = HERE / "build" / hashlib.sha256(text.encode()).hexdigest()[:16]
    made = folder / f"{NAME}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _compile(torch, made)
    return made


def torch_folder() -> Path:
    found: Any = importlib.util.find_spec("torch")
    return Path(found.origin).parent  # it is not imported


def _compile(torch: Path, made: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("the imagined CUDA device is compiled on first use, and there is no g++ or clang++")
    include = torch / "include"
    headers = [include, include / "torch/csrc/api/include", sysconfig.get_paths()["include"]]
    command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", *(f"-isystem{path}" for path in headers)]
    command += [f"-DTORCH_EXTENSION_NAME={NAME}", str(HERE / "device.cpp"), "-o", f"{made}.part"]
    command += [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}"]
    command += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the imagined CUDA device does not compile:\n{done.stderr[-4000:]}")
    Path(f"{made}.part").rename(made)


lib: Any = None  # the compiled module, once it is loaded


def load() -> None:
    """Give this process imagined cards. Once, before torch is imported."""
    global lib
    assert "torch" not in sys.modules, "torch makes its CUDA hooks once: load the imagined device before torch"
    made = build()
    ctypes.CDLL(str(made), mode=ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401

    spec: Any = importlib.util.spec_from_file_location(NAME, made)
    lib = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lib)
    own = [str(HERE / name) for name in ("device.py", "kernels.py", "communicator.py", "nccl.py", "rank.py")]
    lib.begin([*own, sysconfig.get_path("stdlib") + "/"])
    _python_side()


def card_name(card: Any) -> str:
    """Of a card among those of the machine. `card`: as this process counts those that it sees."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return seen.split(",")[card.index] if seen else str(card.index)


def _python_side() -> None:
    """What torch.cuda asks of the part of torch that a CPU build lacks."""
    import torch

    cuda, accelerator = torch.cuda, torch.accelerator
    before_synchronize: list[Any] = []

    class StreamBase(torch.Stream):
        cuda_stream = property(lambda self: self.stream_id)

        def __new__(cls, priority: int = 0, **place: int):
            if any(place.values()):
                return super().__new__(cls, **place)
            return super().__new__(cls, device=torch.device("cuda", cuda.current_device()), priority=priority)

    class EventBase(torch.Event):
        cuda_event = property(lambda self: self.event_id)

        def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: Any):
            return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

        def wait(self, stream: Any) -> None:
            if not self.event_id:
                lib.find("event never recorded", "a stream waits for an event that nobody has recorded")
            super().wait(stream)

    torch._C._CudaStreamBase, torch._C._CudaEventBase = StreamBase, EventBase
    spec: Any = importlib.util.find_spec("torch.cuda.streams")
    spec.loader.exec_module(cuda.streams)  # its classes, on these bases
    cuda.Stream, cuda.Event, cuda.ExternalStream = cuda.streams.Stream, cuda.streams.Event, cuda.streams.ExternalStream

    def place_of(stream: Any) -> tuple[int, int, int]:
        return stream.stream_id, stream.device_index, stream.device_type

    def synchronize(device: Any = None) -> None:
        cuda._lazy_init()
        for ready in before_synchronize:
            ready()
        accelerator.synchronize()

    def get_device_properties(device: Any = None) -> Any:
        card = torch.device("cuda", torch.cuda._utils._get_device_index(device, optional=True))
        return types.SimpleNamespace(**properties, uuid=f"GPU-{card_name(card)}")

    properties = {"name": "NVIDIA H100 80GB HBM3 (imagined)", "major": 9, "minor": 0}
    properties |= {"total_memory": 80 << 30, "multi_processor_count": 132}
    here = {"stream_id": 0, "device_type": 1}
    made: dict[Any, dict[str, Any]] = {
        torch._C: {
            "_cuda_getCurrentStream": lambda index: place_of(accelerator.current_stream(index)),
            "_cuda_getDefaultStream": lambda index: place_of(torch.Stream(device_index=index, **here)),
            "_cuda_setStream": lambda **place: torch._C._accelerator_setStream(torch.Stream(**place)),
            "_cuda_getDevice": accelerator.current_device_index,
            "_cuda_setDevice": accelerator.set_device_index,
        },
        torch.backends.cuda: {"is_built": lambda: True},
        cuda: {
            "is_available": lambda: True,
            "_initialized": True,
            "is_initialized": lambda: not lib.is_forked(),
            "_is_in_bad_fork": lib.is_forked,
            "default_generators": tuple(map(lib.generator, range(CARDS))),
            "is_current_stream_capturing": lambda: False,
            "_exchange_device": torch._C._accelerator_exchangeDevice,
            "_maybe_exchange_device": torch._C._accelerator_maybeExchangeDevice,
            "device_count": lib.visible_cards,
            "current_device": accelerator.current_device_index,
            "synchronize": synchronize,
            "before_synchronize": before_synchronize,
            "get_device_properties": get_device_properties,
            "memory_allocated": lambda device=None: lib.memory()["allocated"],
            "max_memory_allocated": lambda device=None: lib.memory()["peak"],
            "memory_reserved": lambda device=None: lib.memory()["reserved"],
            "reset_peak_memory_stats": lambda device=None: lib.reset_peak(),
            "empty_cache": lambda: None,
        },
        cuda.random: {"device_count": lib.visible_cards},
    }
    for home, functions in made.items():
        for name, function in functions.items():
            setattr(home, name, function)
    _storages_and_host_reads(torch)
    from . import kernels

    kernels.register()


def _storages_and_host_reads(torch: Any) -> None:
    resize = torch.UntypedStorage.resize_

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        lib.resize_storage(self, size)
        return self

    new = torch.UntypedStorage.__new__

    def on_card(cls: Any, *args: Any, device: Any = None, **options: Any) -> Any:
        options |= {} if device is None else {"device": device}
        if device is None or torch.device(device).type != "cuda":
            return new(cls, *args, **options)
        return torch.empty(*args, **options, dtype=torch.uint8).untyped_storage()

    torch.UntypedStorage.resize_, torch.UntypedStorage.__new__ = resize_, on_card
    for name in ("numpy", "tolist", "__array__", "__reduce_ex__"):  # they read without an operator
        setattr(torch.Tensor, name, _reading(name, getattr(torch.Tensor, name)))
    lib.watch()
    thread: Any = threading.Thread
    start = thread._bootstrap_inner
    thread._bootstrap_inner = lambda one: (lib.watch(), start(one))


def _reading(name: str, inner: Any) -> Any:
    def read(self: Any, *args: Any, **options: Any) -> Any:
        lib.host_read(self, name)
        return inner(self, *args, **options)

    return read
