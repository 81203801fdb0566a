"""Files: clients' uploads, and results of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from carpool.mock.core.lines import bundled


@dataclass(slots=True)
class StoredFile:
    id: str
    filename: str
    purpose: str
    created: float
    expires: float
    lines: Callable[[], Iterator[bytes]]
    """The content; in one piece if it was uploaded."""
    usable_from: float = 0.0
    """Before that, a create does not find it."""
    batch_id: str | None = None
    """The batch that it is a result of."""
    _size: int | None = field(init=False, default=None)

    @property
    def size(self) -> int:
        if self._size is None:
            self._size = sum(map(len, self.lines()))
        return self._size

    def pieces(self, lines: int = 500) -> Iterator[bytes]:
        return bundled(self.lines(), lines)

    def view(self, offset: float) -> dict[str, object]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": int(self.created + offset),
            "expires_at": int(self.expires + offset),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class Files:
    """The files of one project, in the order of their creation."""

    def __init__(self) -> None:
        self._files: dict[str, StoredFile] = {}

    def add(self, file: StoredFile) -> None:
        self._files[file.id] = file

    def find(self, file_id: str, now: float) -> StoredFile | None:
        file = self._files.get(file_id)
        return file if file is not None and now < file.expires else None

    def remove(self, file_id: str) -> None:
        del self._files[file_id]

    def newest_first(self, now: float) -> Iterator[StoredFile]:
        return (file for file in reversed(self._files.values()) if now < file.expires)
