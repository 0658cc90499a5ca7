"""Print docs/openapi.json: the HTTP interface, as the server itself describes it."""

import json

from logprobe.server.app import ROUTES
from logprobe.server.openai.openapi import document


def main() -> None:
    """Print the document."""
    print(json.dumps(document(ROUTES), indent=1, sort_keys=True, ensure_ascii=False))


if __name__ == "__main__":
    main()
