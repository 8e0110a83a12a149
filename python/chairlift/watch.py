"""A look at a forward from below: the memory it takes, the tables it looks up by position, and whether it numbers its
tokens itself."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators that pick or place entries by index.
_INDEXING = {
    getattr(torch.ops.aten, name)
    for name in (
        *("embedding", "gather", "index", "index_select", "take", "_unsafe_index"),
        *("index_add", "index_add_", "index_copy", "index_copy_", "index_put", "index_put_", "_index_put_impl_"),
        *("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"),
    )
}


class ForwardWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches a forward.

    Attributes:
        peak_bytes: Bytes of the tensors alive at its peak.
        table_lengths: Lengths of the tables that are looked up by position.
        numbers_tokens: Whether it counts its tokens off by itself and computes with the result, as if they were
            positions. To pick or to place tokens by such numbers, as experts do, is no such thing.
    """

    def __init__(self, model: torch.nn.Module, position_ids: torch.Tensor) -> None:
        """Watches `model` over tokens at those positions; its weights do not count."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self.table_lengths: set[int] = set()
        self.numbers_tokens = False
        self._alive = 0
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        self._finalizers: list[weakref.finalize[Any, Any]] = []
        self._positions = position_ids.flatten()
        self._numbers: set[int] = set()  # memory that holds numbers of tokens, or what was computed from them alone

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
        results = [tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
        for tensor in results:
            self._count(tensor)
        inputs = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        self._follow_numbers(func, inputs, results)
        return result

    def _look_up(self, table: torch.Tensor, index: torch.Tensor) -> None:
        if index.dtype not in (torch.int64, torch.int32) or index.numel() != self._positions.numel():
            return
        offsets = torch.unique(index.flatten() - self._positions)
        if offsets.numel() == 1 and table.dim() == 2 and table.is_floating_point():
            self.table_lengths.add(table.shape[0] - int(offsets))

    def _follow_numbers(self, func: Any, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        tokens = self._positions.numel()
        if func.overloadpacket is torch.ops.aten.arange:
            self._numbers |= {_memory(tensor) for tensor in results if tensor.numel() == tokens}
            return
        numbers = [tensor for tensor in inputs if _memory(tensor) in self._numbers]
        if not numbers:
            return
        of_tokens = [tensor for tensor in inputs if tokens in tensor.shape and _memory(tensor) not in self._numbers]
        # There whole numbers are an index, which leaves no trace in what is picked or placed.
        indexing = func.overloadpacket in _INDEXING
        as_index = indexing and not any(tensor.is_floating_point() for tensor in numbers)
        if not as_index and any(tensor.is_floating_point() for tensor in of_tokens):
            self.numbers_tokens = True
        elif not (indexing and of_tokens):
            # Empty tensors have no memory to tell them apart by.
            self._numbers |= {_memory(tensor) for tensor in results if tensor.numel()}

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
        self._numbers.discard(pointer)
        self._alive -= nbytes


def _memory(tensor: torch.Tensor) -> int:
    """What a tensor and its views have in common."""
    return tensor.untyped_storage().data_ptr()
