"""Results of a benchmark, kept as they come: one that fails or is killed has lost nothing of what it measured."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType


class Kept:
    """A context manager. found: results so far, which are printed as JSON when it is left, whatever ended it; an
    exception is among them then, as `error`. out: file that has them after every note(); None: no file."""

    def __init__(self, out: Path | None) -> None:
        self.found: dict[str, object] = {}
        self._out = out

    def note(self, **found: object) -> None:
        """Adds to the results, or says that those it has been given before have changed."""
        self.found |= found
        if self._out is not None:
            new = self._out.with_name(self._out.name + ".new")
            new.write_text(json.dumps(self.found, indent=1) + "\n")
            new.rename(self._out)

    def __enter__(self) -> Kept:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.note(error=repr(error)[:2000])
        print(json.dumps(self.found, indent=1), flush=True)
