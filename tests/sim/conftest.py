from __future__ import annotations

import sys
from pathlib import Path

# The words of the contract suite serve here too.
sys.path.insert(0, str(Path(__file__).parent.parent / "contract"))
