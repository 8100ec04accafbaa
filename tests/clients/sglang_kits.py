"""Runs in SGLang's environment: its own kits of HTTP tests, as they are, on a server.

python sglang_kits.py URL
"""

import sys
import unittest
from importlib import import_module
from types import SimpleNamespace

[URL] = sys.argv[1:]
KITS = "sglang.test.kits."
CHOSEN = {"basic_api_contract_kit": "BasicAPIContractMixin"}
"""Kits that speak HTTP alone, and ask for no knowledge of the world, which a toy model has not."""

suite = unittest.TestSuite()
for module, mixin in CHOSEN.items():
    kit = getattr(import_module(KITS + module), mixin)
    attributes = {"base_url": URL, "process": SimpleNamespace(poll=lambda: None, pid=0)}
    suite.addTests(unittest.defaultTestLoader.loadTestsFromTestCase(type(mixin, (kit, unittest.TestCase), attributes)))
result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite)
sys.exit(not result.wasSuccessful())
