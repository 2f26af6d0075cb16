"""How blocks travel between ranks. Each transport is one file or folder; `_contract.py` says what it exports."""
