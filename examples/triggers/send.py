"""Deliver a build as the build server would: python send.py build.json URL"""

import hashlib
import hmac
import sys
import urllib.request
from pathlib import Path

body, url = Path(sys.argv[1]).read_bytes(), sys.argv[2]
signature = hmac.new(b"not-a-secret-in-an-example", body, hashlib.sha256).hexdigest()
request = urllib.request.Request(
    url, body, {"Content-Type": "application/json", "X-Signature-256": f"sha256={signature}"}
)
with urllib.request.urlopen(request) as answer:
    print(answer.status, answer.read().decode())
