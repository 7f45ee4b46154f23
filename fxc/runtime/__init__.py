"""What runs in a server: loads an artifact, binds weights, serves calls. Never imports Dynamo or Inductor."""

from fxc._torch_run import compilers_imported
from fxc.runtime.loader import load
from fxc.runtime.paged_cache import CacheFullError, PagedCache, Sequence
from fxc.runtime.program import Explanation, Program

__all__ = ["CacheFullError", "Explanation", "PagedCache", "Program", "Sequence", "compilers_imported", "load"]
