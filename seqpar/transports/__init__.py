"""Transports move blocks between ranks. Each is one file or folder; `_contract.py` defines what it exports."""
