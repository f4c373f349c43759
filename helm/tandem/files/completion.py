"""What `helm test` runs: one completion, and what proves that prefill and decode both served it.

    python completion.py ENDPOINT [--model NAME] [--timeout S] [--ca FILE]

Needs nothing but the standard library. TANDEM_API_KEY is the API key, where one is asked for.
Ends with 0, or with 1 and what is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

NUM_TOKENS = 16
PROMPT = "def fibonacci(n):"
PAUSE_S = 2.0
CALL_TIMEOUT_S = 60.0
NEEDED = ("prefill_compute_s", "decode_admission_s")
"""Times that only a prefill worker and a decode worker that has its KV can tell."""
STAGES = (NEEDED[0], "kv_transfer_s", NEEDED[1])
"""Those to be shown. How long the transfer took is prefill's to tell, and a short answer may end
before decode has heard of it."""


class NotProvenError(Exception):
    """The answer is not what both roles together give."""


class Endpoint:
    """The router's HTTP."""

    def __init__(self, address: str, ca: str | None) -> None:
        self._address = address.rstrip("/")
        self._key = os.environ.get("TANDEM_API_KEY", "").strip()
        self._context = ssl.create_default_context(cafile=ca) if ca else None

    def call(self, path: str, body: object = None) -> tuple[dict[str, object], str]:
        """The JSON that ``path`` answers, and its header of timings."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", "x-tandem-timings": "1"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._address + path, data, headers)
        with urllib.request.urlopen(
            request, timeout=CALL_TIMEOUT_S, context=self._context
        ) as answer:
            return json.load(answer), answer.headers.get("x-tandem-timings", "")


def wait_ready(endpoint: Endpoint, timeout_s: float, model: str = "") -> None:
    """Return when a request can be served, of ``model`` or else of any."""
    until = time.monotonic() + timeout_s
    last = ""
    path = f"/ready?model={urllib.parse.quote(model, safe='')}" if model else "/ready"
    while True:
        try:
            endpoint.call(path)
            return
        except urllib.error.HTTPError as error:
            trouble = error.read().decode(errors="replace")
        except OSError as error:
            trouble = str(error)
        if time.monotonic() > until:
            raise NotProvenError(f"not ready after {timeout_s:g} s: {trouble}")
        if trouble != last:
            print(f"waiting: {trouble}", flush=True)
            last = trouble
        time.sleep(PAUSE_S)


def first_model(endpoint: Endpoint) -> str:
    """The first one that the router lists."""
    try:
        models, _ = endpoint.call("/v1/models")
    except urllib.error.HTTPError as error:
        raise NotProvenError(f"{error}: {error.read().decode(errors='replace')}") from error
    return str(models["data"][0]["id"])  # type: ignore[index]


def prove(endpoint: Endpoint, model: str = "") -> str:
    """Ask for a completion, check it, and tell what it shows."""
    model = model or first_model(endpoint)
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    try:
        answer, timings_text = endpoint.call("/v1/completions", body)
    except urllib.error.HTTPError as error:
        raise NotProvenError(f"{error}: {error.read().decode(errors='replace')}") from error
    except OSError as error:
        raise NotProvenError(str(error)) from error
    num_tokens = answer["usage"]["completion_tokens"]  # type: ignore[index]
    if num_tokens != NUM_TOKENS:
        # The first is prefill's; all others are decode's.
        raise NotProvenError(f"{num_tokens} tokens and not {NUM_TOKENS}: {answer}")
    timings = json.loads(timings_text or "{}")
    missing = [stage for stage in NEEDED if stage not in timings]
    if missing:
        raise NotProvenError(f"no {', '.join(missing)} in the timings {timings}")
    told = ", ".join(f"{stage} {timings[stage]:.4f}" for stage in STAGES if stage in timings)
    text = answer["choices"][0]["text"]  # type: ignore[index]
    return f"{model}: {num_tokens} tokens through prefill and decode ({told}): {text!r}"


def main(arguments: list[str]) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("endpoint", help="http(s)://host:port of a router")
    parser.add_argument("--model", default="", help="of several; else the first one listed")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds until it is ready")
    parser.add_argument("--ca", default=None, help="PEM file of the authority, for https")
    given = parser.parse_args(arguments)
    endpoint = Endpoint(given.endpoint, given.ca)
    try:
        wait_ready(endpoint, given.timeout, given.model)
        print(prove(endpoint, given.model))
    except NotProvenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
