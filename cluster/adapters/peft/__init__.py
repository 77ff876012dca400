"""PEFT directories that strangers may have written: parsed, checked, or refused with the reason."""
