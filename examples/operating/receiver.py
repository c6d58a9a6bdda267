"""A receiver of webhooks: it checks the signature, and answers 204. WEBHOOK_SECRET is what `webhook add` showed."""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from standardwebhooks import Webhook, WebhookVerificationError

CHECK = Webhook(os.environ["WEBHOOK_SECRET"])


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            CHECK.verify(body, dict(self.headers))
        except WebhookVerificationError:
            self.send_response(401)
        else:
            print(json.loads(body)["type"], flush=True)
            self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver)
print("Listening", flush=True)
server.serve_forever()
