//! Solves queries for schedules whose first runs follow the given order.

use super::answer::{Query, Solution};
use super::compact::Dag;
use super::min_peak::{MinPeak, working_set_bytes};
use super::question::Question;
use super::steps;
use crate::problem::Problem;
use crate::schedule::evaluate;
use ckpt_error::Result;

/// Solves a query for schedules whose first runs follow the given order. The inner error is the smallest peak for which a
/// plan is known, where none fits the budget.
///
/// # Errors
/// A problem that does not run in its own order.
pub fn solve_given(problem: &Problem, query: &Query) -> Result<Result<Solution, Box<MinPeak>>> {
    let before = evaluate(problem, &problem.given_order())?;
    let dag = Dag::new(problem, query.objective, &query.constraints)?;
    let mut question = Question::new(problem, &dag, query, &before);
    let mut own = question.find(query.budget_bytes)?;
    let own_answer = own.as_mut().map(|own| question.answer(own));
    let mut answer = own_answer.transpose()?;
    if answer.as_ref().is_none_or(|answer| !answer.bound.met)
        && let Some(mut better) = steps::smaller(&mut question, own)?
    {
        answer = Some(question.answer(&mut better)?);
    }
    Ok(match answer {
        Some(answer) => Ok(answer),
        None => Err(Box::new(question.min_peak()?.clone())),
    })
}

/// Solves many budgets for schedules whose first runs follow the given order.
///
/// # Errors
/// A problem that does not run in its own order.
pub fn frontier_given(
    problem: &Problem,
    query: &Query,
    budgets: &[u64],
) -> Result<Vec<Option<Solution>>> {
    let before = evaluate(problem, &problem.given_order())?;
    let dag = Dag::new(problem, query.objective, &query.constraints)?;
    let least_bytes = before.static_bytes + working_set_bytes(&dag).0 as u64;
    let mut order: Vec<usize> = (0..budgets.len()).collect();
    order.sort_by_key(|i| budgets[*i]);
    let mut solutions: Vec<Option<Solution>> = vec![None; budgets.len()];
    let mut smaller: Option<Solution> = None;
    for &i in &order {
        if budgets[i] < least_bytes {
            continue;
        }
        let mut query = query.clone();
        query.budget_bytes = budgets[i];
        let known = smaller.iter().map(|s| s.schedule.clone());
        query.seeds.extend(known);
        let mut question = Question::new(problem, &dag, &query, &before);
        let found = question.find(budgets[i])?;
        let answer = found.map(|mut found| question.answer(&mut found));
        solutions[i] = answer.transpose()?;
        smaller = solutions[i].clone().or(smaller);
    }
    // What fits a smaller budget fits a larger one, so a bound at the larger holds at the smaller.
    let mut lower = 0.0f64;
    for i in order.into_iter().rev() {
        if let Some(solution) = solutions[i].take() {
            lower = lower.max(solution.bound.lower);
            let plan = (solution.schedule, solution.score);
            solutions[i] = Some(Solution::new(plan, lower, query.objective, &before));
        }
    }
    Ok(solutions)
}
