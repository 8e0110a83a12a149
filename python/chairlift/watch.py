"""A look at a forward from below: the memory it takes, and the tables it looks up by position."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class ForwardWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches a forward: the bytes of the tensors alive at its peak, and tables that are looked up by position."""

    def __init__(self, model: torch.nn.Module, position_ids: torch.Tensor) -> None:
        """Watches `model` over tokens at those positions; its weights do not count."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self.table_lengths: set[int] = set()
        self._alive = 0
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        self._finalizers: list[weakref.finalize[Any, Any]] = []
        self._positions = position_ids.flatten()

    def __exit__(self, *exception: Any) -> None:
        """Ends the watch, and lets go of what still lives."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for finalizer in self._finalizers:
            finalizer.detach()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Looks at one operator, and runs it."""
        aten = torch.ops.aten
        if func is aten.embedding.default:
            self._look_up(args[0], args[1])
        elif func is aten.index_select.default:
            self._look_up(args[0], args[2])
        elif func is aten.index.Tensor and args[1] and args[1][0] is not None:
            self._look_up(args[0], args[1][0])
        elif func is aten.gather.default and args[0].dim() == 3 and args[1] == 1:
            self._look_up(args[0][0], args[2][0, :, 0])
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        return result

    def _look_up(self, table: torch.Tensor, index: torch.Tensor) -> None:
        if index.dtype not in (torch.int64, torch.int32) or index.numel() != self._positions.numel():
            return
        offsets = torch.unique(index.flatten() - self._positions)
        if offsets.numel() == 1 and table.dim() == 2 and table.is_floating_point():
            self.table_lengths.add(table.shape[0] - int(offsets))

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        pointer, nbytes = storage.data_ptr(), storage.nbytes()
        if pointer == 0 or pointer in self._storages:
            return
        self._storages.add(pointer)
        self._alive += nbytes
        self.peak_bytes = max(self.peak_bytes, self._alive)
        finalizer = weakref.finalize(storage, self._forget, pointer, nbytes)
        finalizer.atexit = False
        self._finalizers.append(finalizer)

    def _forget(self, pointer: int, nbytes: int) -> None:
        self._storages.discard(pointer)
        self._alive -= nbytes
