#!/usr/bin/env bash
# Generates runtime/pb from proto/ into the folder given, or with --check compares what would be
# generated with what is committed.
set -euo pipefail
cd "$(dirname "$0")/.."

generate() {
    local protos=(proto/*.proto)
    .venv/bin/python -m grpc_tools.protoc -Iruntime/pb=proto \
        --python_out="$1" --pyi_out="$1" --grpc_python_out="$1" \
        "${protos[@]/#proto/runtime/pb}"
}

if [[ "${1:-}" != --check ]]; then
    generate "${1:?usage: scripts/proto.sh FOLDER | --check}"
    exit
fi
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
generate "$folder"
status=0
for file in "$folder"/runtime/pb/*; do
    cmp -s "$file" "runtime/pb/$(basename "$file")" || {
        echo "error: runtime/pb/$(basename "$file") is not what proto/ says; run: make proto" >&2
        status=1
    }
done
for file in runtime/pb/*_pb2*; do
    [[ -e "$folder/$file" ]] || { echo "error: $file has no .proto" >&2; status=1; }
done
exit "$status"
