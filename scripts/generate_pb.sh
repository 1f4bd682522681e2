#!/usr/bin/env bash
# Generates common/pb from proto/. Usage: scripts/generate_pb.sh [OUT_FOLDER], default: the project's root.
# The virtual path -Icommon/pb=proto makes the generated modules import each other as common.pb.*.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-.}"
mkdir -p "$out/common/pb"
"${PYTHON:-python}" -m grpc_tools.protoc -Icommon/pb=proto \
  --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
  common/pb/kv_transfer.proto common/pb/serving.proto
