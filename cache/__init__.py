"""The cache of artifacts and compiled pieces. Knows nothing of torch."""

from fxc.cache import key
from fxc.cache.artifact import Artifact
from fxc.cache.choice import Rules
from fxc.cache.prune import Pruned
from fxc.cache.remote import Remote
from fxc.cache.store import Cache, Summary
from fxc.cache.trust import Trust

__all__ = ["Artifact", "Cache", "Pruned", "Remote", "Rules", "Summary", "Trust", "key"]
