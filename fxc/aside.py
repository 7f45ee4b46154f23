"""What libraries print while they are tried, kept for those who ask: on a failed try, torch.export prints its graph."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator


class _Kept(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.rich_proxied_file = sys.stderr
        """Where rich goes on drawing progress meanwhile."""


@contextlib.contextmanager
def kept_aside() -> Iterator[None]:
    """Keep what the block writes to sys.stderr, as a note of the error that it ends with; drop it where it succeeds."""
    kept = _Kept()
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.ERROR))
    try:
        with contextlib.redirect_stderr(kept):
            yield
    except Exception as error:
        if kept.getvalue():
            error.add_note(kept.getvalue())
        raise
    finally:
        logging.disable(disabled)
