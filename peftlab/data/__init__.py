"""Text, tokenizers, packing into rows and a resumable iterator: numpy until the device."""
