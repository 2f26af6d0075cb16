"""How blocks travel between ranks; one transport = one file or folder that exports `why_not` and `Transport`."""
