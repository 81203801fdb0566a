"""A tool for agents that take tools from MCP servers: `lookup` notes what it was called with, and finds something.

python lookup_server.py NOTES speaks MCP over standard input and output; each call is a line of JSON in NOTES.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# Some agents close every schema, so that what careless re-encoding would spoil must be asked for: see checks.arguments.
AWKWARD = {"ünïcode": '\u2028"\\', "nested": {"n": [1, 2.5, None, True]}}
SCHEMA = {
    "type": "object",
    "properties": {"query": {"type": "string"}, **{name: {"const": value} for name, value in AWKWARD.items()}},
    "required": ["query", *AWKWARD],
}
TOOL = {"name": "lookup", "description": "Looks something up.", "inputSchema": SCHEMA}


def result(asked: dict[str, Any], notes: Path) -> dict[str, Any]:
    method, params = asked["method"], asked.get("params", {})
    if method == "initialize":
        about = {"name": "real", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        with notes.open("a", encoding="utf-8") as file:
            file.write(json.dumps(params["arguments"]) + "\n")
        return {"content": [{"type": "text", "text": "It was found."}]}
    return {}


def main(notes: Path) -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" in asked:  # the others are notifications, which are not answered
            answer = {"jsonrpc": "2.0", "id": asked["id"], "result": result(asked, notes)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
