"""One thread for operators in every test here, and budgets of model data alone."""

from tests.support.loops.budgets import model_data_alone as model_data_alone
from tests.support.one_thread import one_thread as one_thread
