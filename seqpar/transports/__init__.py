"""How blocks travel between ranks; one transport = one file that exports `supports` and `Transport`."""
