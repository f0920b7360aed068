"""Detect whether a model is a chain of modules, as BackPACK's second-order extensions require."""

from __future__ import annotations

from torch import Tensor


class NoChainError(RuntimeError):
    """The model is not a chain of modules."""


class Chain:
    """Checks that each leaf module takes exactly what the one before it returned.

    BackPACK identifies the module that produced a tensor by the tensor's address. An in-place operation or a view in
    between would be skipped silently, so shapes, strides and versions must agree as well.
    """

    def __init__(self) -> None:
        self._last: tuple[object, ...] | None = None
        self._last_path = "the model's input"
        self._broken: str | None = None
        self._called: set[str] = set()

    @staticmethod
    def _print(tensor: object) -> tuple[object, ...] | None:
        if not isinstance(tensor, Tensor):
            return None
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor._version

    def before(self, path: str, args: tuple[object, ...]) -> None:
        """Record that a leaf module begins."""
        if path in self._called:
            self._broken = self._broken or f"in the second call of '{path}'"
        self._called.add(path)
        if self._last is not None and (len(args) != 1 or self._print(args[0]) != self._last):
            self._broken = self._broken or f"between '{self._last_path}' and '{path}'"

    def after(self, path: str, output: object) -> None:
        """Record that a leaf module ends."""
        self._last, self._last_path = self._print(output), path

    def check(self) -> None:
        """Raise if the model is not a chain of its leaf modules.

        Raises:
            NoChainError: If it is not; the message names the place.
        """
        if self._broken:
            raise NoChainError(
                f"Something happens {self._broken}: a functional call (use a module instead: nn.ReLU, nn.Flatten), a "
                "branch, or a layer used twice."
            )
