"""What a module has that somebody else may have imported, or is just importing on another thread.

Python lists a module before it has run it: what it defines comes one by one, and all of it only with the last line. Of
torch's large ones (`torch._dynamo`, which building an optimizer imports) that takes seconds. Nobody has used yet what
is not there.
"""

from __future__ import annotations

import sys
from typing import Any


def imported(module: str, name: str, otherwise: Any = None) -> Any:
    """Return what a module has under a name; `otherwise` if nobody has imported it, or not yet as far as that.

    Args:
        module: its full name. It is not imported.
        name: what is looked for.
        otherwise: what to return then.
    """
    return getattr(sys.modules.get(module), name, otherwise)
