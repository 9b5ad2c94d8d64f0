"""Elastic training: ranks are killed and elastic agents come and go, and the training ends as if nothing had happened.

`rank` is the program that the ranks run, and `mailbox` holds the files that both sides exchange.
"""
