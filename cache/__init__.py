"""The cache of artifacts and compiled pieces. Knows nothing of torch."""

from fxc.cache import key
from fxc.cache.artifact import Artifact
from fxc.cache.store import Cache, Summary

__all__ = ["Artifact", "Cache", "Summary", "key"]
