"""What runs in a server: loads an artifact, binds weights, serves calls. Never imports Dynamo or Inductor."""

from fxc.runtime.loader import load
from fxc.runtime.program import Explanation, Program

__all__ = ["Explanation", "Program", "load"]
