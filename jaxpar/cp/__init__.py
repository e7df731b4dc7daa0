"""Context parallelism: the ranks of an axis share a sequence; keys and values travel round the ring."""

from jaxpar.cp._order import head_tail_order as head_tail_order
from jaxpar.cp._order import padded_length as padded_length
from jaxpar.cp._ring_attention import ring_attention as ring_attention
from jaxpar.cp._sequence import join_sequence as join_sequence
from jaxpar.cp._sequence import sequence_positions as sequence_positions
from jaxpar.cp._sequence import split_sequence as split_sequence
