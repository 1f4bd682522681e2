"""Streams one chat answer from pdserve over gRPC, with a deadline.

python scripts/grpc_client.py "Why is the sky blue?"
python scripts/grpc_client.py "Why is the sky blue?" --address serve.example.com:8001 --tls

OPENAI_API_KEY is sent, if there is one.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import grpc

from common.pb import serving_pb2 as pb
from common.pb.serving_pb2_grpc import InferenceStub


def main() -> int:
    parser = argparse.ArgumentParser(prog="grpc_client.py", description="Streams one chat answer over gRPC.")
    parser.add_argument("prompt")
    parser.add_argument("--address", default="127.0.0.1:8001", help="default %(default)s")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS", help="default %(default)s")
    parser.add_argument("--max-tokens", type=int, default=128, help="default %(default)s")
    parser.add_argument("--tls", action="store_true", help="over TLS, trusting the system's authorities")
    parser.add_argument("--ca", type=Path, metavar="FILE", help="over TLS, trusting this authority, a PEM file")
    options = parser.parse_args()
    if options.max_tokens < 1 or options.timeout <= 0:
        parser.error("--max-tokens must be at least 1 and --timeout above 0")

    request = pb.GenerateRequest(
        chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=options.prompt)]),
        sampling=pb.SamplingParams(max_tokens=options.max_tokens, temperature=0),
    )
    api_key = os.environ.get("OPENAI_API_KEY")
    metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
    try:
        channel = connect(options.address, options.tls, options.ca)
    except OSError as error:
        parser.error(f"--ca: {error}")
    with channel:
        # The deadline travels with the call: when it passes, the server stops working on the answer too.
        stub: Any = InferenceStub(channel)
        call = stub.Generate(request, timeout=options.timeout, metadata=metadata)
        try:
            for response in call:
                print(response.text, end="", flush=True)
                if response.finish_reason:
                    print_ending(response)
        except KeyboardInterrupt:
            call.cancel()  # frees the request's memory on the workers at once
            print("\ncancelled", file=sys.stderr)
            return 130
        except grpc.RpcError as error:
            print(f"\n{describe(error)}", file=sys.stderr)
            return 1
    return 0


def connect(address: str, over_tls: bool, authority: Path | None) -> grpc.Channel:
    """Raises: OSError when the authority cannot be read."""
    if not over_tls and authority is None:
        return grpc.insecure_channel(address)
    trusted = None if authority is None else authority.read_bytes()
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(trusted))


def describe(error: Any) -> str:
    """The server names the type of its error in the trailing metadata; without one, the call never reached it."""
    metadata = dict(error.trailing_metadata() or ())
    return f"{metadata.get('pdserve-error', error.code().name)}: {error.details()}"


def print_ending(response: pb.GenerateResponse) -> None:
    usage, timings = response.usage, response.timings
    workers = " → ".join(name for name in (timings.prefill_worker, timings.decode_worker) if name)
    print(f"\n\n{usage.prompt_tokens} tokens in, {usage.completion_tokens} out ({response.finish_reason}), {workers}")
    print("  ".join(f"{stage.name} {stage.seconds * 1000:.1f} ms" for stage in timings.stages))
    print(f"TTFT {timings.ttft_s * 1000:.1f} ms  TPOT {timings.tpot_s * 1000:.1f} ms", end="  ")
    print(f"end to end {timings.end_to_end_s * 1000:.1f} ms")


if __name__ == "__main__":
    sys.exit(main())
