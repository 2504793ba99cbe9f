#!/usr/bin/env bash
# anthropic (Python): `beta.messages.tool_runner` does not send the conversation of
# `messages.create` with tools added. Its first request has a field `thread`, which asks the
# server to hold the conversation. A compatible server that refuses the unknown field as any
# other (400, invalid_request_error) ends the run with BadRequestError.
#
# Expected: the tool runner is a loop around /v1/messages, so a server that answers
# `messages.create` answers it. Seen with anthropic 2.14.0: only if the 400 has
# error.details.error_code "thread_unsupported_request" does the runner send the whole
# conversation instead, without `thread`, and go on.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet anthropic==2.14.0
cat > "$work/show.py" <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import anthropic
from anthropic import beta_tool

REFUSAL = {"type": "invalid_request_error", "message": "no threads here"}
seen, coded = [], True


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        seen.append("thread" in body)
        status, answer = 200, {
            "id": "msg_1", "type": "message", "role": "assistant", "model": "m",
            "content": [{"type": "text", "text": "Hello."}], "stop_reason": "end_turn",
            "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1},
        }
        if "thread" in body:
            details = {"error_code": "thread_unsupported_request"} if coded else {}
            status, answer = 400, {"type": "error", "error": REFUSAL | {"details": details}}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


server = HTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = anthropic.Anthropic(
    base_url=f"http://127.0.0.1:{server.server_port}", api_key="none", max_retries=0
)


@beta_tool
def weather(city: str) -> str:
    """Gives a forecast.

    Args:
        city: The city.
    """
    return "sunny"


asked = dict(model="m", max_tokens=9, messages=[{"role": "user", "content": "Hi"}])
client.messages.create(**asked)
print("create", seen)
for coded in (True, False):
    seen.clear()
    try:
        texts = [
            block.text
            for message in client.beta.messages.tool_runner(tools=[weather], **asked)
            for block in message.content
        ]
    except anthropic.BadRequestError as error:
        texts = type(error).__name__
    print("tool_runner", "with the code" if coded else "without it", seen, texts)
PY
found=$("$work/venv/bin/python" "$work/show.py")
echo "for each request, whether it has the field thread, and the texts or the exception:"
echo "$found"
expected="create [False]
tool_runner with the code [True, False] ['Hello.']
tool_runner without it [True] BadRequestError"
[[ $found == "$expected" ]]
