"""What a layer has in place of attention: mixers, whose past is a state of fixed size."""
