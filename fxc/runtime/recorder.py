"""Records CUDA graphs, all into one memory pool."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxc import _torch_run

Replay = Callable[[], None]


class Recorder:
    """Records what is launched on a stream of its own. Memory that a graph has freed is used by the ones after it, so
    that results are overwritten by replays of other graphs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()
            release = _torch_run.hold_pool(device, self._pool)
        weakref.finalize(self, release).atexit = False
        self._warm: set[Callable[..., Any]] = set()

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Everything inside runs on the recorder's stream: after what was launched, and before what will be.

        No garbage is collected meanwhile, as no graph may be destroyed while another one is recorded.
        """
        gc.collect()
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.device(self.device), torch.no_grad():
                torch.cuda.empty_cache()  # of graphs that are gone
                _torch_run.clear_cublas_workspaces()
                self._stream.wait_stream(torch.cuda.current_stream())
                try:
                    with torch.cuda.stream(self._stream):
                        yield
                finally:
                    torch.cuda.current_stream().wait_stream(self._stream)
        finally:
            if collecting:
                gc.enable()

    def record(self, call: Callable[[], Any], of: Callable[..., Any]) -> tuple[Replay, Any]:
        """The graph of a call, as a function, and the call's result, which every replay computes anew.

        Args:
            of: what is called. It runs once before it is first recorded: kernels are loaded then and workspaces made,
                some of which cannot be done while recording. Where other sizes have others, it fails, and runs again.
        """
        if of not in self._warm:
            self._run(call)
            self._warm.add(of)
            return self._record(call)
        try:
            return self._record(call)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            self._run(call)
            return self._record(call)

    def _run(self, call: Callable[[], Any]) -> None:
        """In the pool, where cuBLAS keeps the workspace that it makes now: others, torch.compile among them, have all
        workspaces cleared, and one outside the pool would be given away while graphs write into it."""
        with _torch_run.pool(self.device, self._pool):
            call()
        self._stream.synchronize()

    def _record(self, call: Callable[[], Any]) -> tuple[Replay, Any]:
        """Not with `torch.cuda.graph`: that collects garbage and empties the allocator's cache, each time."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = call()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        return graph.replay, result

    def make(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A tensor in the pool, outside of any graph."""
        with _torch_run.pool(self.device, self._pool):
            return call()

    def free_bytes(self) -> int:
        """Of the GPU: graphs take memory that torch's allocator does not know of."""
        return int(torch.cuda.mem_get_info(self.device)[0])
